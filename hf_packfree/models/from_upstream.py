"""Patched classes of families without a file of their own: upstream's classes, each with one of our
mixins in front.
"""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from inspect import signature
from typing import Any

from hf_packfree.models.attention_interface import InterfaceAttention
from hf_packfree.models.base import classes_of
from hf_packfree.models.fused_layer import PlainDecoderLayer
from hf_packfree.models.gated_delta_net import SeparateProjections, SplitProjections
from hf_packfree.models.gated_mlp import GatedMLP
from hf_packfree.models.heads import heads_of
from hf_packfree.models.kimi_delta_attention import PackedKimiDeltaAttention
from hf_packfree.models.mamba2 import PackedMamba2
from hf_packfree.models.record_head import RecordHead
from hf_packfree.models.short_conv import PackedShortConv
from hf_packfree.models.tiny import SIZES, delta_net_sizes
from hf_packfree.models.trunk import PackedTrunk

MIXINS = (
    PackedKimiDeltaAttention,
    SeparateProjections,
    SplitProjections,
    PackedShortConv,
    PackedMamba2,
    InterfaceAttention,
    GatedMLP,
    PlainDecoderLayer,
    PackedTrunk,
)


@cache
def replacements(name: str) -> dict[str, Any]:
    """Return the names that a family's file defines, for the modeling module `name`: {name: our
    class} for each text model, mixer and head, HEADS and tiny_config.
    """
    upstream, home = import_module(name), f"{__name__}:{name}"
    ours: dict[str, Any] = dict(classes_of(upstream, home, *MIXINS))
    heads = heads_of(upstream, home, RecordHead)
    config = next(
        (getattr(upstream, head).config_class for head in heads if "CausalLM" in head), None
    )
    return ours | heads | {"HEADS": heads, "tiny_config": partial(tiny_config, config)}


_TINY = (
    SIZES
    | delta_net_sizes()
    | {
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "block_auto_adjust_ff_dim": False,
    }
)


def tiny_config(config: Any, **more: Any) -> Any:
    """Return the configuration of a model of some 100,000 parameters with every kind of layer.

    Args:
        config: the family's configuration class.
        more: fields from the family's row in the registry.
    """
    known = signature(config).parameters
    sizes = {name: value for name, value in _TINY.items() if name in known}
    return config(**(sizes | more))
