"""The table of what is supported.  To add a family: one row here, one file in models/ with its tiny config."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn

from hf_packfree.models import compat


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Attributes:
        name: how people call it, and the argument of `packfree verify`.
        upstream: transformers' modeling module.
        replacement: our module; it holds a subclass of the same name for each class in `swaps`, and `tiny_config`;
            `HEADS`, if it is there, the classes around the text model that are swapped with it.
        trunk: the class that reads boundaries: the text model.
        layer: the decoder layer.
        swaps: every class to swap, with the reason.
        causal_lm: upstream's class for verification and the demo.
    """

    name: str
    upstream: str
    replacement: str
    trunk: str
    layer: str
    swaps: dict[str, str]
    causal_lm: str

    def pairs(self) -> dict[type[nn.Module], type[nn.Module]]:
        """Return {upstream's class: ours}; imports both modules.

        Upstream's class is read from ours: the name in upstream's module may stand for another class for a while.
        """
        ours = import_module(self.replacement)
        return {self._upstream_of(getattr(ours, name)): getattr(ours, name) for name in self.swaps}

    def head_pairs(self) -> dict[type[nn.Module], type[nn.Module]]:
        """Return {upstream's class: ours} of the heads, which are swapped where nothing wraps them."""
        heads = getattr(import_module(self.replacement), "HEADS", {})
        return {self._upstream_of(ours): ours for ours in heads.values()}

    def optional_swaps(self) -> dict[type[nn.Module], type[nn.Module]]:
        """Return {upstream's class: ours} of what is left alone where something wraps it: packed rows are exact all the same.

        Those are the heads, and decoder layers in releases whose own hand the record on.
        """
        layers = {before: ours for before, ours in self.pairs().items() if before.__name__ == self.layer}
        return self.head_pairs() | ({} if compat.LAYERS_DROP_KEYWORDS else layers)

    def trunk_class(self) -> type[nn.Module]:
        """Return upstream's class of the text model."""
        return next(before for before in self.pairs() if before.__name__ == self.trunk)

    def _upstream_of(self, ours: type[nn.Module]) -> type[nn.Module]:
        return next(base for base in ours.__mro__[1:] if base.__module__ == self.upstream)

    def tiny_config(self) -> Any:
        """Return the configuration of the family's tiny model."""
        build: Callable[[], Any] = import_module(self.replacement).tiny_config
        return build()


_TRUNK = "documents are read once, here, and handed to every layer"
_LAYER = "the record goes to either mixer, and residual sums and norms run as one"
_DELTA_NET = "the convolution's window and the recurrent state cross document boundaries"
_ATTENTION = "keys of other documents are visible, or hidden behind a T x T mask"
_VISION = "the row would be numbered as one document, and images in packed rows have to be refused"

FAMILIES: tuple[Family, ...] = (
    Family(
        name="qwen3_5",
        upstream="transformers.models.qwen3_5.modeling_qwen3_5",
        replacement="hf_packfree.models.qwen3_5",
        trunk="Qwen3_5TextModel",
        layer="Qwen3_5DecoderLayer",
        swaps={
            "Qwen3_5TextModel": _TRUNK,
            "Qwen3_5DecoderLayer": _LAYER,
            "Qwen3_5GatedDeltaNet": _DELTA_NET,
            "Qwen3_5Attention": _ATTENTION,
            "Qwen3_5Model": _VISION,
        },
        causal_lm="Qwen3_5ForCausalLM",
    ),
    Family(
        name="qwen3_5_moe",
        upstream="transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
        replacement="hf_packfree.models.qwen3_5_moe",
        trunk="Qwen3_5MoeTextModel",
        layer="Qwen3_5MoeDecoderLayer",
        swaps={
            "Qwen3_5MoeTextModel": _TRUNK,
            "Qwen3_5MoeDecoderLayer": _LAYER,
            "Qwen3_5MoeGatedDeltaNet": _DELTA_NET,
            "Qwen3_5MoeAttention": _ATTENTION,
            "Qwen3_5MoeModel": _VISION,
        },
        causal_lm="Qwen3_5MoeForCausalLM",
    ),
    Family(
        name="qwen3_next",
        upstream="transformers.models.qwen3_next.modeling_qwen3_next",
        replacement="hf_packfree.models.qwen3_next",
        trunk="Qwen3NextModel",
        layer="Qwen3NextDecoderLayer",
        swaps={
            "Qwen3NextModel": _TRUNK,
            "Qwen3NextDecoderLayer": _LAYER,
            "Qwen3NextGatedDeltaNet": _DELTA_NET,
            "Qwen3NextAttention": _ATTENTION,
        },
        causal_lm="Qwen3NextForCausalLM",
    ),
)


def family_of(model: nn.Module) -> Family | None:
    """Return the family whose text model (upstream's or ours) is in `model`, or None.

    Only families whose modeling module is loaded are looked at: no other can have models.
    """
    for family in FAMILIES:
        if family.upstream in sys.modules:
            trunk = family.trunk_class()
            if any(isinstance(module, trunk) for module in model.modules()):
                return family
    return None
