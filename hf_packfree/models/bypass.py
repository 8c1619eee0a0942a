"""Whether every layer that mixes tokens still reads the record: one that was changed since patching would leak in silence."""

from __future__ import annotations

from typing import Any

from hf_packfree.errors import PatchConflict
from hf_packfree.models.replacement import Replacement


def check_mixers(trunk: Any) -> None:
    """Refuse a trunk with a mixer that is no longer ours, or that a forward of its own instance hides.

    Wrappers that hold ours, and accelerate's hooks, which call it, are fine.

    Raises:
        PatchConflict: such a layer was found.
    """
    for number, layer in enumerate(trunk.layers):
        for name in ("linear_attn", "self_attn"):
            mixer = getattr(layer, name, None)
            if mixer is None or _reads(mixer):
                continue
            raise PatchConflict(
                f"found layers.{number}.{name} changed since the model was patched ({type(mixer).__name__}, or a forward of "
                "its own instance): it would read from one document into the next; wanted our class in force; undo the change, "
                "or call apply_patches(model) after a layer was replaced"
            )


def _reads(mixer: Any) -> bool:
    if isinstance(mixer, Replacement):
        return "forward" not in vars(mixer) or hasattr(mixer, "_hf_hook")
    return any(isinstance(part, Replacement) for part in mixer.modules())
