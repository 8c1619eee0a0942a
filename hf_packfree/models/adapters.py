"""Read PEFT's LoRA layers as arguments of `hf_packfree.ops.fused`, without importing PEFT.

LoRA and DoRA are fused, on a plain linear layer or on one of bitsandbytes' in 4 bits. DoRA with
dropout, other variants, adapters with biases, other methods and other quantised bases are not:
their layers run their own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree.ops.backend import HALF
from hf_packfree.ops.fused.low_rank import Adapted, Adapter, Layer, spare_columns
from hf_packfree.ops.fused.weights import Made, Weight, rounded, scaled, whole

_LORA = {("peft.tuners.lora.layer", "Linear"), ("peft.tuners.lora.bnb", "Linear4bit")}
_IN_4_BITS = "bitsandbytes.nn.modules", "Linear4bit"
_DORA = (
    ("peft.tuners.lora.variants", "DoraLinearVariant"),
    ("peft.tuners.lora.dora", "DoraLinearLayer"),
)


def is_lora(layer: Any) -> bool:
    """Whether the layer is PEFT's LoRA of a linear layer, running PEFT's own forward."""
    if _named(layer) not in _LORA:
        return False
    kind = type(layer)
    forward = kind.forward
    return (
        forward.__module__ == kind.__module__
        and not hasattr(forward, "__wrapped__")
        and is_untouched(vars(layer))
    )


def is_plain(layer: Any, dtype: torch.dtype) -> bool:
    """Whether the layer reads x in `dtype` and only multiplies it by weights; it may have LoRA and
    a bias.
    """
    if type(layer) is nn.Linear:
        return type(layer.weight) is nn.Parameter and is_untouched(vars(layer))
    if is_lora(layer):
        return is_plain(layer.base_layer, dtype)
    return read_weight(layer, dtype) is not None


def under_autocast(device: torch.device) -> bool:
    """Whether autocast is on for a device, of which some have none."""
    kind = device.type
    return _has_autocast(kind) and torch.is_autocast_enabled(kind)


_has_autocast = cache(torch.amp.is_autocast_available)


def computed_in(x: Tensor) -> torch.dtype:
    """Return the dtype of a linear layer's product with x: autocast's where it is on, else x's."""
    if under_autocast(x.device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def products_in(dtype: torch.dtype, weight: Weight) -> Weight | None:
    """Return a weight in `dtype`, to which autocast rounds it; None: the dtypes differ without
    autocast.
    """
    if not isinstance(weight, nn.Parameter) or weight.dtype == dtype:
        return weight
    if not under_autocast(weight.device) or torch.float64 in (weight.dtype, dtype):
        return None
    return rounded(weight, dtype)


def read_lora(layer: Any, x: Tensor) -> Layer | None:
    """Return the base's weight with the active adapters, or None if a call of `layer` on x does
    anything else.

    Args:
        layer: see `is_lora`.
    """
    dtype = computed_in(x)
    weight = read_weight(layer.base_layer, dtype)
    # a call would merge them out of the base
    if weight is None or (layer.disable_adapters and layer.merged):
        return None
    if layer.disable_adapters or layer.merged:
        return products_in(dtype, weight)
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    read = [_adapter(layer, name, x) for name in names]
    adapters = [adapter for adapter in read if adapter]
    if len(adapters) < len(names):
        return None
    if any(name in _variants(layer) for name in names):
        return _with_dora(layer, names, weight, adapters, dtype)
    multiplied = products_in(dtype, weight)
    return (
        Adapted(multiplied, tuple(adapters)) if multiplied is not None and adapters else multiplied
    )


def room_beside(x: Tensor, layers: Iterable[Any]) -> int:
    """Return how many columns the layers' LoRA takes beside x, which they read; 0 where the
    backward pass will not run.
    """
    found = [
        layer
        for layer in layers
        if is_lora(layer) and not layer.disable_adapters and not layer.merged
    ]
    if not found or not torch.is_grad_enabled():
        return 0
    downs = [
        layer.lora_A[name].weight
        for layer in found
        for name in layer.active_adapters
        if name in layer.lora_A
    ]
    dtype, autocast = computed_in(x), under_autocast(x.device)
    like = x if x.dtype == dtype else x.new_empty(0, x.shape[-1], dtype=dtype)
    return spare_columns(like, [(dtype if autocast else d.dtype, len(d)) for d in downs])


def _with_dora(
    layer: Any, names: list[str], weight: Weight, adapters: list[Adapter], dtype: torch.dtype
) -> Layer | None:
    """Return the weight with adapters of which some are DoRA: each of these scales the rows of the
    weight and of the adapters before it.
    """
    total: Tensor | None = None
    added: list[Adapter] = []
    for name, adapter in zip(names, adapters, strict=True):
        added.append(adapter)
        if name in _variants(layer):
            scale = _magnitude_over_norm(layer.lora_magnitude_vector[name], weight, adapter)
            if scale is None:
                return None
            total = scale if total is None else total * scale
            added = [replace(one, up=(scale[:, None] * one.up).to(one.up.dtype)) for one in added]
    multiplied = products_in(dtype, weight) if total is None else scaled(weight, total, dtype)
    return None if multiplied is None else Adapted(multiplied, tuple(added))


def _magnitude_over_norm(dora: Any, weight: Weight, adapter: Adapter) -> Tensor | None:
    """Return DoRA's magnitude, trained, over the norm of every row of W + scale B A, which counts
    as a constant: [F].

    None: the layer's call does anything else.
    """
    magnitude, down = getattr(dora, "weight", None), adapter.down
    is_trained = isinstance(weight, Tensor) and weight.requires_grad
    if (
        is_trained
        or _named(dora) != _DORA[1]
        or dora.fan_in_fan_out
        or not is_untouched(vars(dora))
    ):
        return None
    if type(magnitude) is not nn.Parameter or (magnitude.dtype, magnitude.device) != (
        down.dtype,
        down.device,
    ):
        return None
    with torch.no_grad():
        norm: Tensor = dora.get_weight_norm(
            whole(weight).to(down.dtype), adapter.up @ down, adapter.scale
        )
    return magnitude / norm


def kind_called(layer: Any, x: Tensor, *, adapters: bool = True) -> str | None:
    """Name what keeps a linear layer that reads x from being fused; None: nothing does.

    Args:
        adapters: whether LoRA is fused at all, see `hf_packfree.models.plain_layers.plain_layers`.
    """
    method = _method(layer)
    if method is None:
        return _of_linear(layer, x, adapters) if isinstance(layer, nn.Linear) else None
    if adapters and is_lora(layer) and read_lora(layer, x) is not None:
        return None
    return _of_lora(layer) if method == "LORA" else method


def _method(layer: Any) -> str | None:
    """The name of the PEFT method whose layer a module is; None: it is not PEFT's."""
    for kind in type(layer).__mro__:
        package, _, rest = kind.__module__.partition(".")
        if package == "peft":
            return rest.split(".")[1].upper() if rest.startswith("tuners.") else kind.__name__
    return None


def _of_linear(layer: nn.Linear, x: Tensor, quantised: bool) -> str | None:
    if not is_untouched(vars(layer)):
        return "hooks or a forward of its own"
    if quantised and read_weight(layer, computed_in(x)) is not None:
        return None
    return _quantisation(layer)


def _of_lora(layer: Any) -> str:
    """Name what a LoRA layer has that is not fused."""
    if not is_untouched(vars(layer)):
        return "LoRA with hooks or a forward of its own"
    if getattr(layer, "lora_magnitude_vector", None):
        drops = any(type(dropout) is not nn.Identity for dropout in layer.lora_dropout.values())
        return "DoRA with dropout" if drops else "DoRA"
    if variants := _variants(layer):
        return type(next(iter(variants.values()))).__name__
    if (quantisation := _quantisation(layer.get_base_layer())) is not None:
        return f"LoRA on {quantisation}"
    return "LoRA with a bias" if any(layer.lora_bias.values()) else "LoRA that is not fused"


def _quantisation(layer: Any) -> str | None:
    """Name the class of a layer that is not torch's own, or of its weight where torchao has put
    one; None: neither.
    """
    kind = type(layer) if type(layer) is not nn.Linear else type(layer.weight)
    return (
        kind.__name__
        if type(layer) is not nn.Linear or kind.__module__.startswith("torchao.")
        else None
    )


def _adapter(layer: Any, name: str, x: Tensor) -> Adapter | None:
    """The adapter of that name, where it is two products and a scale."""
    down, up = weight_alone(layer.lora_A[name]), weight_alone(layer.lora_B[name])
    dropout = _probability(layer.lora_dropout[name])
    dtype = computed_in(x) if under_autocast(x.device) else None
    if (
        down is None
        or up is None
        or dropout is None
        or not _is_known(layer, name)
        or not _fits(layer, down, up, x)
    ):
        return None
    return Adapter(down, up, float(layer.scaling[name]), dropout, dtype)


def _is_known(layer: Any, name: str) -> bool:
    """Whether the adapter is LoRA, or DoRA without dropout, and no other formula."""
    if name not in _variants(layer):
        # of a PEFT that has DoRA without variants
        return not getattr(layer, "use_dora", {}).get(name)
    return (
        _named(_variants(layer)[name]) == _DORA[0] and type(layer.lora_dropout[name]) is nn.Identity
    )


def _variants(layer: Any) -> Any:
    """The adapters of another formula than LoRA's, by name."""
    return getattr(layer, "lora_variant", {})


def _named(thing: Any) -> tuple[str, str]:
    """Where its class comes from."""
    return type(thing).__module__, type(thing).__name__


def _fits(layer: Any, down: Tensor, up: Tensor, x: Tensor) -> bool:
    """Whether PEFT computes the adapter in x's dtype, in fp32 on x of half precision, or in
    autocast's dtype.
    """
    if down.dtype != up.dtype or down.device != x.device:
        return False
    if under_autocast(x.device):
        return torch.float64 not in (down.dtype, x.dtype)
    wider = (
        down.dtype == torch.float32
        and x.dtype in HALF
        and getattr(layer, "cast_input_dtype_enabled", True)
    )
    return down.dtype == x.dtype or wider


def _probability(dropout: Any) -> float | None:
    """What a dropout module sets to zero now; None if it is anything else, or leaves nothing."""
    kind = type(dropout)
    if kind not in (nn.Identity, nn.Dropout) or not is_untouched(vars(dropout)):
        return None
    if kind is nn.Identity or not dropout.training:
        return 0.0
    return dropout.p if dropout.p < 1 else None


def read_weight(layer: Any, dtype: torch.dtype) -> Weight | None:
    """The weight of a linear layer that is nothing else, in 16 or more bits, or in 4 of
    bitsandbytes' for products in `dtype`.
    """
    weight = weight_alone(layer)
    if weight is not None or _named(layer) != _IN_4_BITS or not is_untouched(vars(layer)):
        return weight
    state, size = (
        getattr(layer.weight, "quant_state", None),
        (layer.out_features, layer.in_features),
    )
    known = (
        state is not None
        and tuple(state.shape) == size
        and not getattr(state, "packing_format_for_cpu", False)
    )
    if not known or layer.bias is not None or layer.compute_dtype not in (None, dtype):
        return None
    return Made(layer.weight.data, size, dtype, _restore(state, dtype))


def _restore(state: Any, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """bitsandbytes' own dequantisation."""
    from bitsandbytes.functional import dequantize_4bit

    def restore(bits: Tensor) -> Tensor:
        weight: Tensor = dequantize_4bit(bits.view(-1, 1), state)
        return weight.to(dtype)

    return restore


def weight_alone(layer: Any) -> Tensor | None:
    """The weight of a linear layer that is nothing else."""
    # others may hold no weight of that name
    if type(layer) is not nn.Linear:
        return None
    # past nn.Module's own lookup, which is slow
    fields = vars(layer)
    weight, bias = map(fields["_parameters"].get, ("weight", "bias"))
    return (
        weight if bias is None and type(weight) is nn.Parameter and is_untouched(fields) else None
    )


def is_untouched(fields: dict[str, Any]) -> bool:
    """Whether a call of the module with these attributes runs its class's forward, and no hook
    of its own.
    """
    return "forward" not in fields and not has_hooks(fields)


def has_hooks(fields: dict[str, Any]) -> bool:
    """Whether a call of the module with these attributes runs hooks of its own."""
    return bool(
        fields["_forward_hooks"]
        or fields["_forward_pre_hooks"]
        or fields["_backward_hooks"]
        or fields["_backward_pre_hooks"]
        or "_hf_hook" in fields
    )
