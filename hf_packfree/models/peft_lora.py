"""Read PEFT's LoRA layers as arguments of `hf_packfree.ops.fused`, without importing PEFT.

LoRA and DoRA are fused, on a plain linear layer or on one of bitsandbytes' in 4 bits. DoRA with
dropout, other variants, adapters with biases, other methods and other quantised bases are not:
their layers run their own forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree.models.linear_weights import (
    cast_weight,
    compute_dtype,
    plain_weight,
    qualified_name,
    read_weight,
    runs_class_forward,
    under_autocast,
)
from hf_packfree.ops.backend import HALF
from hf_packfree.ops.fused.computed_weights import Weight, materialize, scaled
from hf_packfree.ops.fused.lora import Adapter, Layer, LoraLinear, spare_columns
from hf_packfree.ops.fused.lora_products import on_tensor_cores, products_for

_LORA = {("peft.tuners.lora.layer", "Linear"), ("peft.tuners.lora.bnb", "Linear4bit")}
_DORA_VARIANT = "peft.tuners.lora.variants", "DoraLinearVariant"
_DORA_LAYER = "peft.tuners.lora.dora", "DoraLinearLayer"


def is_lora(layer: Any) -> bool:
    """Whether the layer is PEFT's LoRA of a linear layer, running PEFT's own forward."""
    kind: Any = type(layer)
    return _is_lora_class(kind, getattr(kind, "forward", None)) and runs_class_forward(vars(layer))


# called hundreds of times a step; a forward that is replaced is another key
@lru_cache(maxsize=256)
def _is_lora_class(kind: type, forward: Any) -> bool:
    known = (kind.__module__, kind.__name__) in _LORA
    return known and forward.__module__ == kind.__module__ and not hasattr(forward, "__wrapped__")


def read_lora(layer: Any, x: Tensor) -> Layer | None:
    """Return the base's weight with the active adapters, or None if a call of `layer` on x does
    anything else.

    Args:
        layer: see `is_lora`.
    """
    dtype = compute_dtype(x)
    base, names = read_weight(layer._modules["base_layer"], dtype), _active_adapters(layer)
    if base is None or names is None:
        return None
    cast = dtype if under_autocast(x.device) else None
    # the adapters of another formula than LoRA's, by name
    variants = getattr(layer, "lora_variant", {})
    adapters: list[Adapter] = []
    for name in names:
        if (adapter := _read_adapter(layer, name, variants.get(name), x, cast)) is None:
            return None
        adapters.append(adapter)
    if not variants.keys().isdisjoint(names):
        return _with_dora(layer, names, base, adapters, dtype)
    weight = cast_weight(base, dtype)
    return LoraLinear(weight, tuple(adapters)) if weight is not None and adapters else weight


def spare_columns_for(layers: Iterable[Any], x: Tensor) -> int:
    """Return how many columns to allocate behind the rows of x, which these layers read, for
    h = x A' of their LoRA; 0 without a backward pass.
    """
    if not torch.is_grad_enabled():
        return 0
    dtype, autocast, tensor_cores = compute_dtype(x), under_autocast(x.device), on_tensor_cores(x)
    adapters = []
    for layer in layers:
        for name in (is_lora(layer) and _active_adapters(layer)) or ():
            A = layer._modules["lora_A"]._modules[name]._parameters.get("weight")
            if A is not None:
                of_adapter = dtype if autocast else A.dtype
                adapters.append((products_for(dtype, of_adapter, tensor_cores), A.shape[0]))
    return spare_columns(x, dtype, adapters)


def unfit_dtype(layer: Any, x: Tensor) -> torch.dtype | None:
    """Return the dtype of the first active adapter on which PEFT multiplies a rounded x, or a
    widened one, as fused layers do not; None: there is none.

    Args:
        layer: see `is_lora`.
    """
    cast = compute_dtype(x) if under_autocast(x.device) else None
    for name in _active_adapters(layer) or ():
        A, B = (plain_weight(layer._modules[part]._modules[name]) for part in ("lora_A", "lora_B"))
        if A is not None and B is not None and not _fits(layer, A, B, x, cast):
            return A.dtype
    return None


def _active_adapters(layer: Any) -> list[str] | None:
    """Return the names of the adapters that a call adds to what the base layer returns; None:
    adapters are disabled while merged, so PEFT would unmerge first.
    """
    merged = layer.merged
    if layer.disable_adapters:
        return None if merged else []
    if merged:
        return []
    active, known = layer.active_adapter, layer._modules["lora_A"]._modules
    return [name for name in ([active] if isinstance(active, str) else active) if name in known]


def _read_adapter(
    layer: Any, name: str, variant: Any, x: Tensor, cast: torch.dtype | None
) -> Adapter | None:
    """Return the adapter of that name, where it is two products and a scale.

    Args:
        variant: of another formula than LoRA's; only DoRA without dropout is known.
        cast: autocast's dtype where it is on.
    """
    # past nn.Module's own lookup, which is slow
    parts = layer._modules
    A = plain_weight(parts["lora_A"]._modules[name])
    B = plain_weight(parts["lora_B"]._modules[name])
    dropout = parts["lora_dropout"]._modules[name]
    probability = _probability(dropout)
    if A is None or B is None or probability is None or not _fits(layer, A, B, x, cast):
        return None
    if variant is not None:
        known = qualified_name(variant) == _DORA_VARIANT and type(dropout) is nn.Identity
    else:
        # of a PEFT that has DoRA without variants
        known = not getattr(layer, "use_dora", {}).get(name)
    if not known:
        return None
    return Adapter(A, B, float(layer.scaling[name]), probability, cast)


def _fits(layer: Any, A: Tensor, B: Tensor, x: Tensor, cast: torch.dtype | None) -> bool:
    """Whether PEFT computes the adapter in x's dtype, in fp32 on x of half precision, or in
    autocast's dtype.
    """
    if A.dtype != B.dtype or A.device != x.device:
        return False
    if cast is not None:
        return torch.float64 not in (A.dtype, x.dtype)
    casts = getattr(layer, "cast_input_dtype_enabled", True)
    return A.dtype == x.dtype or (casts and A.dtype == torch.float32 and x.dtype in HALF)


def _probability(dropout: Any) -> float | None:
    """Return what a dropout module sets to zero now; None if it is anything else, or leaves
    nothing.
    """
    kind = type(dropout)
    if kind not in (nn.Identity, nn.Dropout) or not runs_class_forward(vars(dropout)):
        return None
    if kind is nn.Identity or not dropout.training:
        return 0.0
    return dropout.p if dropout.p < 1 else None


def _with_dora(
    layer: Any, names: list[str], base: Weight, adapters: list[Adapter], dtype: torch.dtype
) -> Layer | None:
    """Return the weight with adapters of which some are DoRA: each of these scales the rows of the
    weight and of the adapters before it.
    """
    total: Tensor | None = None
    added: list[Adapter] = []
    for name, adapter in zip(names, adapters, strict=True):
        added.append(adapter)
        if name in layer.lora_variant:
            scale = _magnitude_over_norm(layer.lora_magnitude_vector[name], base, adapter)
            if scale is None:
                return None
            total = scale if total is None else total * scale
            added = [replace(one, B=(scale[:, None] * one.B).to(one.B.dtype)) for one in added]
    weight = cast_weight(base, dtype) if total is None else scaled(base, total, dtype)
    return None if weight is None else LoraLinear(weight, tuple(added))


def _magnitude_over_norm(dora: Any, base: Weight, adapter: Adapter) -> Tensor | None:
    """Return DoRA's magnitude m, trained, over the norm of every row of W + scaling B A, which
    counts as a constant: [F].

    None: the layer's call does anything else.
    """
    if isinstance(base, Tensor) and base.requires_grad:
        return None
    if (
        qualified_name(dora) != _DORA_LAYER
        or dora.fan_in_fan_out
        or not runs_class_forward(vars(dora))
    ):
        return None
    A, magnitude = adapter.A, getattr(dora, "weight", None)
    if type(magnitude) is not nn.Parameter:
        return None
    if (magnitude.dtype, magnitude.device) != (A.dtype, A.device):
        return None
    with torch.no_grad():
        weight = materialize(base).to(A.dtype)
        norm: Tensor = dora.get_weight_norm(weight, adapter.B @ A, adapter.scaling)
    return magnitude / norm
