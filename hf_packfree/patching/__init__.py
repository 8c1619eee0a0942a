"""How a model is changed, and changed back: the table of swaps; plan, check, apply, undo, report."""

from hf_packfree.patching.apply import apply_patches, remove_patches
from hf_packfree.patching.report import PatchReport, patch_report

__all__ = ["PatchReport", "apply_patches", "patch_report", "remove_patches"]
