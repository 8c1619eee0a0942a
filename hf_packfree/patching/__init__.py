"""Patching and restoring models, also at load time: the table of families, plan, checks, apply,
undo and report.
"""

from hf_packfree.patching.apply import apply_patches, remove_patches
from hf_packfree.patching.loading import Registration, register_patches
from hf_packfree.patching.mtp_head import add_mtp, remove_mtp
from hf_packfree.patching.prewarm import prewarm
from hf_packfree.patching.report import PatchReport, patch_report

__all__ = [
    "PatchReport",
    "Registration",
    "add_mtp",
    "apply_patches",
    "patch_report",
    "prewarm",
    "register_patches",
    "remove_mtp",
    "remove_patches",
]
