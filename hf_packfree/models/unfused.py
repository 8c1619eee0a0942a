"""Why a linear layer is not fused, in words, for the report."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_packfree.models.linear_weights import compute_dtype, read_weight, runs_class_forward
from hf_packfree.models.peft_lora import is_lora, read_lora, unfit_dtypes
from hf_packfree.ops.backend import qualified_name

SHARDED = "sharded weights"
"""The ending of a reason for projections that hold `DTensor`s, which FSDP2 gathers in forward
passes.
"""


ZERO3 = "hooks of ZeRO-3 (not where its leaf_module names the decoder layers)"
"""The reason of projections whose weights DeepSpeed gathers one by one."""


def why_not_fused(layer: Any, x: Tensor, *, adapters: bool = True) -> str | None:
    """Return why a linear layer that reads x is not fused, in words, or None if it is fused.

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
    """Whether a module is a linear layer, or PEFT's layer around one."""
    return isinstance(layer, nn.Linear) or _peft_method(layer) is not None


def is_compiled(module: Any) -> bool:
    """Whether a module was compiled, by `module.compile()`, or is the wrapper that
    `torch.compile(module)` returns.
    """
    made = qualified_name(module) == ("torch._dynamo.eval_frame", "OptimizedModule")
    return made or module._compiled_call_impl is not None


def _peft_method(layer: Any) -> str | None:
    """Return the name of the PEFT method whose layer a module is, or None if the class is not
    PEFT's.
    """
    for kind in type(layer).__mro__:
        package, _, rest = kind.__module__.partition(".")
        if package == "peft":
            return rest.split(".")[1].upper() if rest.startswith("tuners.") else kind.__name__
    return None


def _called_for(layer: nn.Module) -> str:
    """Return what runs only if a layer is called, in words."""
    gathered = any(hasattr(parameter, "ds_shape") for parameter in layer.parameters())
    return ZERO3 if gathered else "hooks or a forward of its own"


def _of_linear(layer: nn.Linear, x: Tensor, quantised: bool) -> str | None:
    if not runs_class_forward(vars(layer)):
        return _called_for(layer)
    if quantised and read_weight(layer, compute_dtype(x)) is not None:
        return None
    return _quantisation(layer, x)


def _of_lora(layer: Any, x: Tensor) -> str:
    """Return why a LoRA layer is not fused, in words."""
    if not runs_class_forward(vars(layer)):
        return f"LoRA with {_called_for(layer)}"
    if getattr(layer, "lora_magnitude_vector", None):
        drops = any(type(dropout) is not nn.Identity for dropout in layer.lora_dropout.values())
        return "DoRA with dropout" if drops else "DoRA"
    if variants := getattr(layer, "lora_variant", {}):
        return type(next(iter(variants.values()))).__name__
    base = layer.get_base_layer()
    is_read = is_lora(layer) and read_weight(base, compute_dtype(x)) is not None
    if is_read and (dtypes := unfit_dtypes(layer, x)) is not None:
        return f"LoRA in {dtypes} on activations in {x.dtype}".replace("torch.", "")
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
    """Return the name of a quantised layer's class or of its weight's class from torchao, or
    `SHARDED`; None for torch's own layer with a plain weight.
    """
    kind: type = type(layer)
    if kind is not nn.Linear:
        return kind.__name__ + (_other_dtype(layer, x) if kind.__name__ == "Linear4bit" else "")
    if isinstance(layer.weight, DTensor):
        return SHARDED
    kind = type(layer.weight)
    return kind.__name__ if kind.__module__.startswith("torchao.") else None


def _other_dtype(layer: Any, x: Tensor) -> str:
    """Return the compute dtype of a layer in 4 bits, in words, if it differs from the dtype of the
    product with x; else "".
    """
    found, wanted = layer.compute_dtype, compute_dtype(x)
    if found in (None, wanted):
        return ""
    return f" whose bnb_4bit_compute_dtype is {found}, not {wanted}".replace("torch.", "")
