"""Weights of plain linear layers, torch's or bitsandbytes' in 4 bits, in the dtype of the product,
which under autocast is autocast's.
"""

from __future__ import annotations

from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree.ops.backend import qualified_name
from hf_packfree.ops.fused.computed_weights import ComputedWeight, Weight, rounded

_LINEAR_4BIT = "bitsandbytes.nn.modules", "Linear4bit"


def under_autocast(device: torch.device) -> bool:
    """Whether autocast is on for a device; some kinds of device have no autocast."""
    kind = device.type
    return _has_autocast(kind) and torch.is_autocast_enabled(kind)


_has_autocast = cache(torch.amp.is_autocast_available)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return autocast's dtype on a device, or None where autocast is off. In models in float64,
    autocast applies to some operations only.
    """
    return torch.get_autocast_dtype(device.type) if under_autocast(device) else None


def compute_dtype(x: Tensor, *weights: Tensor) -> torch.dtype:
    """Return the dtype of a linear layer's product with x: autocast's where autocast is on and
    nothing is in float64, else x's.
    """
    if under_autocast(x.device) and torch.float64 not in [one.dtype for one in (x, *weights)]:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def cast_weight(weight: Weight, dtype: torch.dtype) -> Weight | None:
    """Return a weight rounded to `dtype`, as autocast does; None if the dtypes differ without
    autocast.
    """
    if weight.dtype == dtype or isinstance(weight, ComputedWeight):
        return weight
    if not under_autocast(weight.device) or torch.float64 in (weight.dtype, dtype):
        return None
    return rounded(weight, dtype)


def read_weight(layer: Any, dtype: torch.dtype) -> Weight | None:
    """Return the weight of a plain nn.Linear, or of bitsandbytes' Linear4bit, dequantised to
    `dtype`. None for any other layer, and for layers with a bias, hooks or a forward on the
    instance.
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
    """Return the weight of an nn.Linear without bias, hooks or a forward on the instance; else
    None.
    """
    # other layers may have no attribute `weight`
    if type(layer) is not nn.Linear:
        return None
    # nn.Module's own lookup of attributes is slow
    fields = vars(layer)
    parameters = fields["_parameters"]
    weight = parameters.get("weight")
    alone = parameters.get("bias") is None and type(weight) is nn.Parameter
    return weight if alone and runs_class_forward(fields) else None


def runs_class_forward(fields: dict[str, Any]) -> bool:
    """Whether a call of the module with these attributes runs its class's forward without hooks of
    the instance.
    """
    return not ("forward" in fields or "_hf_hook" in fields or any(_hooks_of(fields)))


def has_hooks(fields: dict[str, Any]) -> bool:
    """Whether a call of the module with these attributes runs hooks of the instance."""
    return "_hf_hook" in fields or any(_hooks_of(fields))


_hooks_of = itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
