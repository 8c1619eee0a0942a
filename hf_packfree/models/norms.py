"""Which norm modules are only their weights and formula, so that a kernel may compute them with more in one pass."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_packfree.models.linears import is_hooked
from hf_packfree.models.origin import forward_of, is_upstreams


def adds_one(norm: Any, layer: nn.Module) -> bool:
    """Whether calling `norm`, a part of `layer`, is x / sqrt(mean(x^2) + eps) * (1 + weight) in fp32 and nothing else.

    That is the RMS norm of the family's own modeling module, or Liger's kernel for it, of the class or put on the
    instance.  Adapters, hooks, sharded weights and anything unknown are called as they are.
    """
    return _has_the_formula(norm, layer) and not is_hooked(norm) and type(norm._parameters.get("weight")) is nn.Parameter


def epsilon(norm: Any) -> float:
    """What the norm adds to the mean square; transformers' classes and others' name it differently."""
    found: float = vars(norm)["variance_epsilon" if "variance_epsilon" in vars(norm) else "eps"]
    return found


def _has_the_formula(norm: Any, layer: nn.Module) -> bool:
    if forward_of(norm).__module__.startswith("liger_kernel."):
        return (getattr(norm, "offset", None), getattr(norm, "casting_mode", None)) == (1.0, "gemma")
    return is_upstreams(norm, layer, "RMSNorm")
