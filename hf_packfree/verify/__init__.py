"""The leak, measured: packed against one by one, with a control that must fail."""

from hf_packfree.verify.report import LIMITS, Limits, Measurement, PackingReport, limits_for, relative_rms
from hf_packfree.verify.verify import verify_packing

__all__ = ["LIMITS", "Limits", "Measurement", "PackingReport", "limits_for", "relative_rms", "verify_packing"]
