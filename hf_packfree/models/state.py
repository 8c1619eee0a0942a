"""What a patched module carries: which implementations run in it, and who watches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hf_packfree.errors import PatchConflict
from hf_packfree.packing import PackedSequence

Observer = Callable[[PackedSequence | None, tuple[int, int], Any], None]
"""Called by the trunk before every training forward: the record (None: unpacked), (B, S), the attention mask."""


@dataclass(frozen=True)
class PatchState:
    """Chosen once, when the model is patched, and shared by all its patched modules.

    Attributes:
        conv, delta_rule, attention: names of the backends that run for packed rows.
        unpacked: "upstream", or "native" when our conv and delta rule also run for rows of one document.
        observers: called before every training forward of the trunk.
    """

    conv: str = "torch"
    delta_rule: str = "torch"
    attention: str = "torch"
    unpacked: str = "upstream"
    observers: list[Observer] = field(default_factory=list, compare=False, repr=False)


def state_of(module: nn.Module) -> PatchState:
    """Return the module's state.

    Raises:
        PatchConflict: the module was built by the load-time door inside a trunk that the door does not reach.
    """
    state = getattr(module, "packfree", None)
    if not isinstance(state, PatchState):
        raise PatchConflict(
            f"found a {type(module).__name__} that was swapped while loading inside a text model that was not (a bare "
            "trunk loaded by its own class); wanted both; call apply_patches(model) once on the loaded model"
        )
    return state
