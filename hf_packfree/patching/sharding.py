"""The dtype of the tensors that layers read, also if FSDP gathers weights in another dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from hf_packfree.graphs.by_layer import param_dtype
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
    """Whether a module is wrapped by FSDP, of either version."""
    return is_fsdp1(module) or is_fsdp2(module)


def what_layers_read(model: nn.Module, family: Family | None) -> torch.Tensor:
    """Return a tensor on the device and in the dtype of the layers' inputs: a parameter of the text
    model, whose towers may be in another, or an empty tensor if FSDP gathers parameters in another
    dtype.
    """
    text = next(iter([] if family is None else trunks(model, family)), model)
    parameter, gathered_in = a_parameter(text), policy_dtype(model, family)
    if gathered_in is None:
        return parameter
    return torch.empty(0, dtype=gathered_in, device=parameter.device)


def a_parameter(model: nn.Module) -> torch.Tensor:
    """Return a parameter of the model, for its device and dtype; an empty tensor if it has none."""
    return next(model.parameters(), torch.empty(0))


def policy_dtype(model: nn.Module, family: Family | None) -> torch.dtype | None:
    """Return the dtype to which FSDP casts the gathered weights and the inputs of a text model's
    layers; None if FSDP does not wrap them, or does not cast.

    Only wrappers inside `model` are found, not those around it.
    """
    of_layers = (
        module
        for trunk in ([] if family is None else trunks(model, family))
        for module in trunk.layers.modules()
    )
    projection: Any = next(filter(is_projection, of_layers), None)
    around = [part for part in model.modules() if is_fsdp(part) and projection in part.modules()]
    # modules come before their children: the last wrapper is the innermost, whose policy applies
    return _param_dtype(around[-1]) if around else None


def _param_dtype(wrapped: Any) -> torch.dtype | None:
    if not is_fsdp1(wrapped):
        return param_dtype(wrapped)
    found: torch.dtype | None = wrapped.mixed_precision.param_dtype
    return found
