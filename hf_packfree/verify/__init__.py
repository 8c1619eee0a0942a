"""Measurement of leaks: packed documents against the same documents alone, with an unpatched
control that must leak.
"""

from hf_packfree.verify.model_source import build_model
from hf_packfree.verify.packing_report import (
    LIMITS,
    Limits,
    Measurement,
    PackingReport,
    limits_for,
    relative_rms,
)
from hf_packfree.verify.verify import verify_packing

__all__ = [
    "LIMITS",
    "Limits",
    "Measurement",
    "PackingReport",
    "build_model",
    "limits_for",
    "relative_rms",
    "verify_packing",
]
