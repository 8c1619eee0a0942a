"""Linear layers that PEFT has put LoRA on, read as what `hf_packfree.ops.fused` computes, without importing PEFT.

Only plain LoRA on a plain linear layer is, or on one of bitsandbytes' in 4 bits: variants (DoRA, ...), adapters with biases,
layers of other methods and other quantised bases are called as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree.ops.backend import HALF
from hf_packfree.ops.fused.low_rank import Adapted, Adapter, Layer
from hf_packfree.ops.fused.quantised import Quantised, Restore

_LORA = {("peft.tuners.lora.layer", "Linear"), ("peft.tuners.lora.bnb", "Linear4bit")}
_IN_4_BITS = "bitsandbytes.nn.modules", "Linear4bit"


def is_lora(layer: Any) -> bool:
    """Whether the layer is PEFT's LoRA of a linear layer, running PEFT's own forward."""
    kind = type(layer)
    if (kind.__module__, kind.__name__) not in _LORA:
        return False
    forward = kind.forward
    return forward.__module__ == kind.__module__ and not hasattr(forward, "__wrapped__") and is_untouched(vars(layer))


def read_lora(layer: Any, x: Tensor) -> Layer | None:
    """Return the base's weight, with the adapters that a call of `layer` on x adds now; None if it does anything else.

    Args:
        layer: see `is_lora`.
    """
    weight = read_weight(layer.base_layer, x)
    if weight is None or (layer.disable_adapters and layer.merged):  # a call would merge them out of the base
        return None
    if layer.disable_adapters or layer.merged:
        return weight
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    adapters = [_adapter(layer, name, x) for name in names]
    if not all(adapters):
        return None
    return Adapted(weight, tuple(adapter for adapter in adapters if adapter)) if adapters else weight


def kind_called(layer: Any, x: Tensor, *, adapters: bool = True) -> str | None:
    """Name what was added to a layer that reads x and keeps it from being fused; None: nothing was.

    Args:
        adapters: whether LoRA is fused at all, see `hf_packfree.models.fusable.plain_layers`.
    """
    method = _method(layer)
    if method is None:
        return _of_linear(layer, x, adapters) if isinstance(layer, nn.Linear) else None
    if adapters and is_lora(layer) and read_lora(layer, x) is not None:
        return None
    return _of_lora(layer) if method == "LORA" else method


def _method(layer: Any) -> str | None:
    """The method of PEFT's that a module is of; None: it is not PEFT's."""
    for kind in type(layer).__mro__:
        package, _, rest = kind.__module__.partition(".")
        if package == "peft":
            return rest.split(".")[1].upper() if rest.startswith("tuners.") else kind.__name__
    return None


def _of_linear(layer: nn.Linear, x: Tensor, quantised: bool) -> str | None:
    if not is_untouched(vars(layer)):
        return "hooks or a forward of its own"
    if type(layer) is nn.Linear or (quantised and read_weight(layer, x) is not None):
        return None
    return type(layer).__name__


def _of_lora(layer: Any) -> str:
    """Name what is more than plain LoRA on a plain linear layer."""
    if not is_untouched(vars(layer)):
        return "LoRA with hooks or a forward of its own"
    if any(getattr(layer, "use_dora", {}).values()):
        return "DoRA"
    if variants := getattr(layer, "lora_variant", None):
        return type(next(iter(variants.values()))).__name__
    if type(layer.get_base_layer()) is not nn.Linear:
        return f"LoRA on {type(layer.get_base_layer()).__name__}"
    return "LoRA with a bias" if any(layer.lora_bias.values()) else "LoRA that is not fused"


def _adapter(layer: Any, name: str, x: Tensor) -> Adapter | None:
    """The adapter of that name, where it is two products and a scale."""
    down, up = weight_alone(layer.lora_A[name]), weight_alone(layer.lora_B[name])
    dropout = _probability(layer.lora_dropout[name])
    if down is None or up is None or dropout is None or _is_variant(layer, name) or not _fits(layer, down, up, x):
        return None
    return Adapter(down, up, float(layer.scaling[name]), dropout)


def _is_variant(layer: Any, name: str) -> bool:
    """Whether the adapter is LoRA with another formula."""
    return name in getattr(layer, "lora_variant", ()) or bool(getattr(layer, "use_dora", {}).get(name))


def _fits(layer: Any, down: Tensor, up: Tensor, x: Tensor) -> bool:
    """Whether PEFT computes the adapter in x's dtype, or in fp32 on x of half precision."""
    if down.dtype != up.dtype or down.device != x.device:
        return False
    wider = down.dtype == torch.float32 and x.dtype in HALF and getattr(layer, "cast_input_dtype_enabled", True)
    return down.dtype == x.dtype or wider


def _probability(dropout: Any) -> float | None:
    """What a dropout module sets to zero now; None if it is anything else, or leaves nothing."""
    kind = type(dropout)
    if kind not in (nn.Identity, nn.Dropout) or not is_untouched(vars(dropout)):
        return None
    if kind is nn.Identity or not dropout.training:
        return 0.0
    return dropout.p if dropout.p < 1 else None


def read_weight(layer: Any, x: Tensor) -> Tensor | Quantised | None:
    """The weight of a linear layer that is nothing else for x, in 16 or more bits, or in 4 of bitsandbytes'."""
    weight = weight_alone(layer)
    kind = type(layer)
    if weight is not None or (kind.__module__, kind.__name__) != _IN_4_BITS or not is_untouched(vars(layer)):
        return weight
    state, size = getattr(layer.weight, "quant_state", None), (layer.out_features, layer.in_features)
    known = state is not None and tuple(state.shape) == size and not getattr(state, "packing_format_for_cpu", False)
    if not known or layer.bias is not None or layer.compute_dtype not in (None, x.dtype):
        return None
    return Quantised(layer.weight.data, size, x.dtype, _restore(state, x.dtype))


def _restore(state: Any, dtype: torch.dtype) -> Restore:
    """bitsandbytes' own dequantisation."""
    from bitsandbytes.functional import dequantize_4bit

    def restore(bits: Tensor) -> Tensor:
        weight: Tensor = dequantize_4bit(bits.view(-1, 1), state)
        return weight.to(dtype)

    return restore


def weight_alone(layer: Any) -> Tensor | None:
    """The weight of a linear layer that is nothing else."""
    if type(layer) is not nn.Linear:  # others may hold no weight of that name
        return None
    fields = vars(layer)  # past nn.Module's own lookup, which is slow
    weight, bias = map(fields["_parameters"].get, ("weight", "bias"))
    return weight if bias is None and type(weight) is nn.Parameter and is_untouched(fields) else None


def is_untouched(fields: dict[str, Any]) -> bool:
    """Whether a call of the module with these attributes runs its class's forward, and no hook of its own."""
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
