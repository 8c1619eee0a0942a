"""Linear layers, several of which may read one tensor: their gradients of it are summed inside the matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_packfree.ops.product import as_in_forward, product

_NARROW = 128
"""Layers of fewer outputs: their products wait for x and its gradient to be read, so neighbours read them together."""


def project(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """Return `layer(x)` of each, x [..., D].

    Plain layers on CUDA share one backward pass, which adds each gradient of x onto the last within the matrix product
    instead of in a pass over memory of its own; narrow neighbours are one product.  Others are called as they are.
    """
    weights = plain_weights(x, *layers) if x.is_cuda else None  # without gradients too: the same bits
    return tuple(layer(x) for layer in layers) if weights is None else _Projections.apply(x, *weights)


def plain_weights(x: Any, *layers: Any) -> tuple[Tensor, ...] | None:
    """Return the layers' weights where calling each on x is one product with its weight and nothing else, otherwise None.

    Adapters, quantised layers, hooks, biases and sharded weights are more, and so is every layer under autocast and in
    compiled graphs.  Asked hundreds of times a step, so what holds for all layers is asked once.
    """
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type) or _all_are_hooked():
        return None
    weights, dtype = [], x.dtype
    for layer in layers:
        weight = _weight_alone(layer)
        if weight is None or weight.dtype != dtype:
            return None
        weights.append(weight)
    return tuple(weights)


def _weight_alone(layer: Any) -> Tensor | None:
    """The weight of a linear layer that is nothing else."""
    if type(layer) is not nn.Linear:  # others may hold no weight of that name
        return None
    fields = vars(layer)  # past nn.Module's own lookup, which is slow
    weight, bias = map(fields["_parameters"].get, ("weight", "bias"))
    alone = bias is None and type(weight) is nn.Parameter and "forward" not in fields and not _has_hooks(fields)
    return weight if alone else None


def is_hooked(layer: Any) -> bool:
    """Whether calling the layer does more than its class says (offloading, sharding): its weights cannot just be read."""
    return _has_hooks(vars(layer)) or _all_are_hooked()


def _has_hooks(fields: dict[str, Any]) -> bool:
    return bool(
        fields["_forward_hooks"]
        or fields["_forward_pre_hooks"]
        or fields["_backward_hooks"]
        or fields["_backward_pre_hooks"]
        or "_hf_hook" in fields
    )


_all_are_hooked = nn.modules.module._has_any_global_hook


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        outs: list[Tensor] = []
        for run in _runs(weights):
            out = product(x, _joined(weights[run], 0))
            outs += _parted(out, weights[run], -1)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outs: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        with as_in_forward(x):
            return _gradients(x, weights, d_outs, ctx.needs_input_grad)


def _gradients(
    x: Tensor, weights: Sequence[Tensor], d_outs: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Those of x and of the weights, as far as they are needed."""
    rows, wants_x, wanted = x.flatten(0, -2), needed[0], needed[1:]
    d_x: Tensor | None = None
    d_weights: list[Tensor | None] = [None] * len(weights)
    # Narrowest first: `addmm_` reads and writes all of d_x, which the narrow product would wait for.
    for run in sorted(_runs(weights), key=lambda run: sum(weight.shape[0] for weight in weights[run])):
        d_out = _joined(d_outs[run], -1).flatten(0, -2)
        if wants_x:
            weight = _joined(weights[run], 0)
            d_x = d_out @ weight if d_x is None else d_x.addmm_(d_out, weight)
        if any(wanted[run]):
            d_weights[run] = _parted(d_out.T @ rows, weights[run], 0)
    return None if d_x is None else d_x.view_as(x), *d_weights


def _runs(weights: Sequence[Tensor]) -> list[slice]:
    """Cut the layers into those multiplied as one: narrow neighbours together, every other one by itself."""
    narrow = [weight.shape[0] < _NARROW for weight in weights]
    starts = [i for i in range(len(weights)) if i == 0 or not (narrow[i] and narrow[i - 1])]
    return [slice(*ends) for ends in zip(starts, [*starts[1:], len(weights)], strict=True)]


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)


def _parted(joint: Tensor, weights: Sequence[Tensor], dim: int) -> Sequence[Tensor]:
    return [joint] if len(weights) == 1 else joint.split([weight.shape[0] for weight in weights], dim)
