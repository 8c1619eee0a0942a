"""How a model is changed, and changed back: the table of swaps; plan, check, apply, undo, report; both doors."""

from hf_packfree.patching.apply import apply_patches, remove_patches
from hf_packfree.patching.loading import Registration, register_patches
from hf_packfree.patching.prewarm import prewarm
from hf_packfree.patching.report import PatchReport, patch_report

__all__ = ["PatchReport", "Registration", "apply_patches", "patch_report", "prewarm", "register_patches", "remove_patches"]
