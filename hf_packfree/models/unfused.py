"""What keeps a linear layer from being fused, by name, for the report."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_packfree.models.linear_weights import (
    compute_dtype,
    qualified_name,
    read_weight,
    runs_class_forward,
)
from hf_packfree.models.peft_lora import is_lora, read_lora, unfit_dtype

SHARDED = "sharded weights"
"""What names of projections that hold `DTensor`s end with; FSDP2 gathers them in forward passes."""


def why_not_fused(layer: Any, x: Tensor, *, adapters: bool = True) -> str | None:
    """Name what keeps a linear layer that reads x from being fused; None: nothing does.

    Args:
        adapters: whether LoRA is fused at all, see `hf_packfree.models.plain_layers.plain_layers`.
    """
    method = _peft_method(layer)
    if method is None:
        return _of_linear(layer, x, adapters) if isinstance(layer, nn.Linear) else None
    if method != "LORA":
        return method
    if not adapters:
        return "LoRA under batch_invariant=True"
    return None if is_lora(layer) and read_lora(layer, x) is not None else _of_lora(layer, x)


def is_projection(layer: Any) -> bool:
    """Whether a module is a linear layer, or holds one for a method of PEFT."""
    return isinstance(layer, nn.Linear) or _peft_method(layer) is not None


def is_compiled(module: Any) -> bool:
    """Whether torch.compile was called on a module itself, or made it around one."""
    made = qualified_name(module) == ("torch._dynamo.eval_frame", "OptimizedModule")
    return made or module._compiled_call_impl is not None


def _peft_method(layer: Any) -> str | None:
    """The name of the PEFT method whose layer a module is; None: it is not PEFT's."""
    for kind in type(layer).__mro__:
        package, _, rest = kind.__module__.partition(".")
        if package == "peft":
            return rest.split(".")[1].upper() if rest.startswith("tuners.") else kind.__name__
    return None


def _of_linear(layer: nn.Linear, x: Tensor, quantised: bool) -> str | None:
    if not runs_class_forward(vars(layer)):
        return "hooks or a forward of its own"
    if quantised and read_weight(layer, compute_dtype(x)) is not None:
        return None
    return _quantisation(layer, x)


def _of_lora(layer: Any, x: Tensor) -> str:
    """Name what a LoRA layer has that is not fused."""
    if not runs_class_forward(vars(layer)):
        return "LoRA with hooks or a forward of its own"
    if getattr(layer, "lora_magnitude_vector", None):
        drops = any(type(dropout) is not nn.Identity for dropout in layer.lora_dropout.values())
        return "DoRA with dropout" if drops else "DoRA"
    if variants := getattr(layer, "lora_variant", {}):
        return type(next(iter(variants.values()))).__name__
    base = layer.get_base_layer()
    is_read = is_lora(layer) and read_weight(base, compute_dtype(x)) is not None
    if is_read and (dtype := unfit_dtype(layer, x)) is not None:
        return f"LoRA in {dtype} on activations in {x.dtype}".replace("torch.", "")
    quantisation = _quantisation(base, x)
    if quantisation not in (None, SHARDED):
        return f"LoRA on {quantisation}"
    if any(layer.lora_bias.values()):
        return "LoRA with a bias"
    if quantisation is not None:
        return f"LoRA on {quantisation}"
    sharded = any(isinstance(weight, DTensor) for weight in layer.parameters())
    return f"LoRA of {SHARDED}" if sharded else "LoRA that is not fused"


def _quantisation(layer: Any, x: Tensor) -> str | None:
    """Name the class of a layer that is not torch's own, or of its weight where torchao has put
    one, or that it is sharded; None: nothing of these.
    """
    kind: type = type(layer)
    if kind is not nn.Linear:
        return kind.__name__ + (_other_dtype(layer, x) if kind.__name__ == "Linear4bit" else "")
    if isinstance(layer.weight, DTensor):
        return SHARDED
    kind = type(layer.weight)
    return kind.__name__ if kind.__module__.startswith("torchao.") else None


def _other_dtype(layer: Any, x: Tensor) -> str:
    """Say which dtype a layer in 4 bits computes in, if its product with x has another."""
    found, wanted = layer.compute_dtype, compute_dtype(x)
    if found in (None, wanted):
        return ""
    return f" whose bnb_4bit_compute_dtype is {found}, not {wanted}".replace("torch.", "")
