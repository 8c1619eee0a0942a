"""Weights of plain linear layers, torch's or bitsandbytes' in 4 bits, in the dtype of their
products: under autocast, autocast's.
"""

from __future__ import annotations

from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree.ops.fused.computed_weights import ComputedWeight, Weight, rounded

_LINEAR_4BIT = "bitsandbytes.nn.modules", "Linear4bit"


def under_autocast(device: torch.device) -> bool:
    """Whether autocast is on for a device, of which some have none."""
    kind = device.type
    return _has_autocast(kind) and torch.is_autocast_enabled(kind)


_has_autocast = cache(torch.amp.is_autocast_available)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype in which autocast computes on a device, of models in float64 some parts
    too; None: it is off.
    """
    return torch.get_autocast_dtype(device.type) if under_autocast(device) else None


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a linear layer's product with x: autocast's where it is on, else x's."""
    if under_autocast(x.device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def cast_weight(weight: Weight, dtype: torch.dtype) -> Weight | None:
    """Return a weight in `dtype`, to which autocast rounds it; None: the dtypes differ without
    autocast.
    """
    if weight.dtype == dtype or isinstance(weight, ComputedWeight):
        return weight
    if not under_autocast(weight.device) or torch.float64 in (weight.dtype, dtype):
        return None
    return rounded(weight, dtype)


def read_weight(layer: Any, dtype: torch.dtype) -> Weight | None:
    """Return the weight of a plain nn.Linear, or of bitsandbytes' Linear4bit, dequantised to
    `dtype`; None for any other layer, also one with a bias, hooks or a forward of its own.
    """
    weight = plain_weight(layer)
    if (
        weight is not None
        or qualified_name(layer) != _LINEAR_4BIT
        or not runs_class_forward(vars(layer))
    ):
        return weight
    state = getattr(layer.weight, "quant_state", None)
    shape = layer.out_features, layer.in_features
    if (
        state is None
        or tuple(state.shape) != shape
        or getattr(state, "packing_format_for_cpu", False)
        or layer.bias is not None
        or layer.compute_dtype not in (None, dtype)
    ):
        return None

    def dequantize(bits: Tensor) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        found: Tensor = dequantize_4bit(bits.view(-1, 1), state)
        return found.to(dtype)

    return ComputedWeight(layer.weight.data, shape, dtype, dequantize)


def plain_weight(layer: Any) -> Tensor | None:
    """Return the weight of an nn.Linear without bias, hooks or a forward of its own; else None."""
    # others may hold no weight of that name
    if type(layer) is not nn.Linear:
        return None
    # past nn.Module's own lookup, which is slow
    fields = vars(layer)
    parameters = fields["_parameters"]
    weight = parameters.get("weight")
    alone = parameters.get("bias") is None and type(weight) is nn.Parameter
    return weight if alone and runs_class_forward(fields) else None


def qualified_name(thing: Any) -> tuple[str, str]:
    """Return "module.Class" of an object: classes of optional packages are told by it, without an
    import.
    """
    return type(thing).__module__, type(thing).__name__


def runs_class_forward(fields: dict[str, Any]) -> bool:
    """Whether a call of the module with these attributes runs its class's forward, and no hook
    of its own.
    """
    return not ("forward" in fields or "_hf_hook" in fields or any(_hooks_of(fields)))


def has_hooks(fields: dict[str, Any]) -> bool:
    """Whether a call of the module with these attributes runs hooks of its own."""
    return "_hf_hook" in fields or any(_hooks_of(fields))


_hooks_of = itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
