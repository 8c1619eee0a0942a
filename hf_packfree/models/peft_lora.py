"""Read PEFT's LoRA layers as arguments of `hf_packfree.ops.fused`, without importing PEFT.

LoRA and DoRA are fused, on a plain linear layer or on bitsandbytes' in 4 bits. Layers with DoRA
with dropout, other variants, adapters with biases, other methods or other quantised bases run
PEFT's forward.
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
    read_weight,
    runs_class_forward,
    under_autocast,
)
from hf_packfree.ops.backend import HALF, qualified_name
from hf_packfree.ops.fused.computed_weights import Weight, materialize, scaled
from hf_packfree.ops.fused.lora import Adapter, Layer, LoraLinear, spare_columns
from hf_packfree.ops.fused.lora_products import on_tensor_cores, products_for

_LORA = {("peft.tuners.lora.layer", "Linear"), ("peft.tuners.lora.bnb", "Linear4bit")}
_DORA_VARIANT = "peft.tuners.lora.variants", "DoraLinearVariant"
_DORA_LAYER = "peft.tuners.lora.dora", "DoraLinearLayer"


def is_lora(layer: Any) -> bool:
    """Whether the layer is PEFT's LoRA of a linear layer, and a call runs PEFT's own forward."""
    kind: Any = type(layer)
    return _is_lora_class(kind, getattr(kind, "forward", None)) and runs_class_forward(vars(layer))


# called hundreds of times a step; `forward` is part of the key, because it may be replaced
@lru_cache(maxsize=256)
def _is_lora_class(kind: type, forward: Any) -> bool:
    known = (kind.__module__, kind.__name__) in _LORA
    return known and forward.__module__ == kind.__module__ and not hasattr(forward, "__wrapped__")


def read_lora(layer: Any, x: Tensor) -> Layer | None:
    """Return the base layer's weight with the active adapters, or None if `layer(x)` computes
    anything else.

    Args:
        layer: see `is_lora`.
    """
    dtype = compute_dtype(x)
    base, names = read_weight(layer._modules["base_layer"], dtype), _active_adapters(layer)
    if base is None or names is None:
        return None
    cast = dtype if under_autocast(x.device) else None
    # adapters with another formula than LoRA's, by name
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
    """Return how many spare columns to allocate in x, which these layers read, for h = x A' of
    their LoRA adapters; 0 without a backward pass.
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


def unfit_dtypes(layer: Any, x: Tensor) -> str | None:
    """Return the dtypes of the first active adapter for which PEFT casts x in a way that fused
    layers do not, in words, or None.

    Args:
        layer: see `is_lora`.
    """
    cast = compute_dtype(x) if under_autocast(x.device) else None
    for name in _active_adapters(layer) or ():
        A, B = (plain_weight(layer._modules[part]._modules[name]) for part in ("lora_A", "lora_B"))
        if A is not None and B is not None and not _fits(layer, A, B, x, cast):
            return " and ".join(dict.fromkeys(str(part.dtype) for part in (A, B)))
    return None


def _active_adapters(layer: Any) -> list[str] | None:
    """Return the names of the adapters whose outputs a call adds to the base layer's; None:
    adapters are disabled while merged, so that PEFT would unmerge them first.
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
    """Return the adapter of that name, or None if it is not two products and a scale.

    Args:
        variant: PEFT's variant, for another formula than LoRA's; only DoRA without dropout is
            supported. None: LoRA.
        cast: autocast's dtype, None where autocast is off.
    """
    # nn.Module's own lookup of attributes is slow
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
        # older releases of PEFT have `use_dora` instead of variants
        known = not getattr(layer, "use_dora", {}).get(name)
    if not known:
        return None
    return Adapter(A, B, float(layer.scaling[name]), probability, cast)


def _fits(layer: Any, A: Tensor, B: Tensor, x: Tensor, cast: torch.dtype | None) -> bool:
    """Whether PEFT computes the adapter in x's dtype, in fp32 from x in half precision, or in
    autocast's dtype, as fused layers do.
    """
    if A.dtype != B.dtype or A.device != x.device:
        return False
    if cast is not None:
        return torch.float64 not in (A.dtype, x.dtype)
    casts = getattr(layer, "cast_input_dtype_enabled", True)
    return A.dtype == x.dtype or (casts and A.dtype == torch.float32 and x.dtype in HALF)


def _probability(dropout: Any) -> float | None:
    """Return the probability with which a dropout module sets elements to zero in this mode; None
    for another module, or a probability of 1.
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
    """Return the weight with adapters of which some are DoRA; each DoRA adapter scales the rows of
    the weight, of the adapters before it and of its own B.
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
    """Return DoRA's scale [F], m / norm(W + scaling B A) for every row, where the magnitude m is
    trained and the norm has no gradient.

    Returns None if the DoRA module's call computes anything else.
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
