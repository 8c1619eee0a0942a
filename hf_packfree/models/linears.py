"""Several linear layers that read one tensor: their gradients of it are summed inside the matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def project(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """Return `layer(x)` of each, x [..., D].

    Plain layers on CUDA share one backward pass, which adds each gradient of x onto the last within the matrix product
    instead of in a pass over memory of its own.  Adapters, quantised layers, hooks, biases, autocast and sharded weights
    are called as they are.
    """
    if x.is_cuda and torch.is_grad_enabled() and all(_is_plain(layer, x) for layer in layers):
        weights = (layer.weight for layer in layers)
        return _Projections.apply(x, *weights)
    return tuple(layer(x) for layer in layers)


def is_hooked(layer: Any) -> bool:
    """Whether calling the layer does more than its class says (offloading, sharding): its weights cannot just be read."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return hasattr(layer, "_hf_hook") or any(hooks)


def _is_plain(layer: Any, x: Any) -> bool:
    plain: bool = (
        getattr(layer, "bias", 0) is None
        and type(layer.weight) is nn.Parameter
        and layer.weight.dtype == x.dtype
        and "forward" not in vars(layer)
        and not is_hooked(layer)
        and not torch.is_autocast_enabled(x.device.type)
        and not torch.compiler.is_compiling()
        and type(layer) is nn.Linear
    )
    return plain


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return tuple(nn.functional.linear(x, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outs: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        flat = [d_out.flatten(0, -2) for d_out in d_outs]
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = flat[0] @ weights[0]
            for d_out, weight in zip(flat[1:], weights[1:], strict=True):
                d_x.addmm_(d_out, weight)
            d_x = d_x.view_as(x)
        rows = x.flatten(0, -2)
        needed = ctx.needs_input_grad[1:]
        return d_x, *(d_out.T @ rows if need else None for d_out, need in zip(flat, needed, strict=True))
