"""What layers read, in which dtype, also where FSDP gathers their weights in another one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from hf_packfree.models.unfused import is_projection
from hf_packfree.patching.family import Family
from hf_packfree.patching.plan import trunks


def is_fsdp1(module: Any) -> bool:
    """Whether a module is a wrapper of `FullyShardedDataParallel`."""
    return isinstance(module, FullyShardedDataParallel)


def is_fsdp2(module: Any) -> bool:
    """Whether `fully_shard` was called on a module."""
    return isinstance(module, FSDPModule)


def is_fsdp(module: Any) -> bool:
    """Whether it is either."""
    return is_fsdp1(module) or is_fsdp2(module)


def what_layers_read(model: nn.Module, family: Family | None) -> torch.Tensor:
    """Return a tensor of the device and dtype of what layers read: a parameter, or an empty one
    where FSDP gathers parameters in another dtype.
    """
    parameter, gathered_in = a_parameter(model), policy_dtype(model, family)
    if gathered_in is None:
        return parameter
    return torch.empty(0, dtype=gathered_in, device=parameter.device)


def a_parameter(model: nn.Module) -> torch.Tensor:
    """Return a parameter, for its device and dtype."""
    return next(model.parameters(), torch.empty(0))


def policy_dtype(model: nn.Module, family: Family | None) -> torch.dtype | None:
    """Return the dtype into which FSDP casts gathered weights of a text model's layers, and what
    they read; None: it wraps nothing around them, or casts nothing.

    What is wrapped, and by which policy, is found in `model` alone, not in what is around it.
    """
    of_layers = (
        module
        for trunk in ([] if family is None else trunks(model, family))
        for module in trunk.layers.modules()
    )
    projection: Any = next(filter(is_projection, of_layers), None)
    around = [part for part in model.modules() if is_fsdp(part) and projection in part.modules()]
    # modules come before what they hold: the last one is the innermost, whose policy holds
    return _param_dtype(around[-1]) if around else None


def _param_dtype(wrapped: Any) -> torch.dtype | None:
    # no public name of FSDP2 says it; what a row computed in is stale once a model is sharded
    policy = wrapped.mixed_precision if is_fsdp1(wrapped) else wrapped._get_fsdp_state()._mp_policy
    found: torch.dtype | None = policy.param_dtype
    return found
