"""Packed and padding-free training of linear-attention hybrids and plain decoders, exact and fast.

Importing this package patches nothing and loads no other package; each name loads its module when
first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_packfree._version import __version__

if TYPE_CHECKING:
    from hf_packfree.errors import (
        BackendUnavailable,
        BlindMeasurement,
        BoundaryConflict,
        BoundaryError,
        CacheConflict,
        ContractError,
        LeakDetected,
        MissingHead,
        PackFreeError,
        PatchConflict,
        RankLost,
        UnsupportedInput,
        UnsupportedModel,
    )
    from hf_packfree.models.head_log_probs import token_log_probs
    from hf_packfree.mtp import MTPOptions
    from hf_packfree.packing import PackedSequence
    from hf_packfree.patching import (
        PatchReport,
        Registration,
        add_mtp,
        apply_patches,
        patch_report,
        prewarm,
        register_patches,
        remove_mtp,
        remove_patches,
    )
    from hf_packfree.trainer import PackFreeCallback
    from hf_packfree.verify import PackingReport, verify_packing

_HOMES = {
    "BackendUnavailable": "errors",
    "BlindMeasurement": "errors",
    "BoundaryConflict": "errors",
    "BoundaryError": "errors",
    "CacheConflict": "errors",
    "ContractError": "errors",
    "LeakDetected": "errors",
    "MTPOptions": "mtp",
    "MissingHead": "errors",
    "PackFreeCallback": "trainer",
    "PackFreeError": "errors",
    "PackedSequence": "packing",
    "PackingReport": "verify",
    "PatchConflict": "errors",
    "PatchReport": "patching",
    "RankLost": "errors",
    "Registration": "patching",
    "UnsupportedInput": "errors",
    "UnsupportedModel": "errors",
    "add_mtp": "patching",
    "apply_patches": "patching",
    "patch_report": "patching",
    "prewarm": "patching",
    "register_patches": "patching",
    "remove_mtp": "patching",
    "remove_patches": "patching",
    "token_log_probs": "models.head_log_probs",
    "verify_packing": "verify",
}

__all__ = [
    "BackendUnavailable",
    "BlindMeasurement",
    "BoundaryConflict",
    "BoundaryError",
    "CacheConflict",
    "ContractError",
    "LeakDetected",
    "MTPOptions",
    "MissingHead",
    "PackFreeCallback",
    "PackFreeError",
    "PackedSequence",
    "PackingReport",
    "PatchConflict",
    "PatchReport",
    "RankLost",
    "Registration",
    "UnsupportedInput",
    "UnsupportedModel",
    "__version__",
    "add_mtp",
    "apply_patches",
    "patch_report",
    "prewarm",
    "register_patches",
    "remove_mtp",
    "remove_patches",
    "token_log_probs",
    "verify_packing",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hf_packfree' has no attribute {name!r}")
    return getattr(import_module(f"hf_packfree.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
