"""Which MLPs are only their weights and formula, so that one function with a backward pass of its own computes them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.activations import SiLUActivation

from hf_packfree.models.linears import is_hooked, plain_weights
from hf_packfree.models.origin import forward_of, is_upstreams

_LIGERS = {
    ("liger_kernel.transformers.swiglu", f"{kind}.forward") for kind in ("LigerSwiGLUMLP", "LigerQwen3MoeSwiGLUMLP")
}


def swiglu_weights(mlp: Any, layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the weights of gate, up and down where `mlp(x)` is down(silu(gate(x)) * up(x)) and nothing else, else None.

    That is the MLP of the modeling module that `layer` comes from, or Liger's kernel for it, of the class or put on the
    instance.  Experts, adapters, hooks, biases, quantised or sharded weights and anything unknown are called as they are,
    and so is everything under autocast.
    """
    if not _has_the_formula(mlp, layer) or is_hooked(mlp):
        return None
    return plain_weights(x, *map(mlp._modules.get, ("gate_proj", "up_proj", "down_proj")))  # type: ignore[return-value]


def _has_the_formula(mlp: Any, layer: nn.Module) -> bool:
    runs = forward_of(mlp)
    if (runs.__module__, getattr(runs, "__qualname__", "")) in _LIGERS:
        return True  # whatever activation the module holds
    return is_upstreams(mlp, layer, "MLP") and _is_silu(getattr(mlp, "act_fn", None))


def _is_silu(activation: Any) -> bool:
    if type(activation) is not nn.SiLU and type(activation) is not SiLUActivation:
        return False
    return not is_hooked(activation) and "forward" not in vars(activation)
