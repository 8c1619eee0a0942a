"""Linear layers of one tensor with one backward pass: its gradients are summed inside the matrix products.

Torch's matrix library multiplies, but for few outputs: where an output's block keeps few of the GPU's processors busy, the
library cuts the sum over D into parts, how many depends on the number of rows, and so do the bits.  Our kernel never does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_packfree.ops.backend import HALF, block_width
from hf_packfree.ops.launch import launch
from hf_packfree.ops.operation import Operation
from hf_packfree.ops.product import as_in_forward, product

NARROW = 128
"""Layers of fewer outputs: their products wait for x and its gradient to be read, so neighbours read them together."""
_ROWS = 64  # tokens of a program
_DEPTH = {16: 128, 32: 128, 64: 64, 128: 64}  # by outputs' block: how much of the sums it makes at a time, in shared memory
_PAIR = 64  # outputs of neighbours that one program makes, at most: the shared memory of small GPUs (99 KiB) holds no more
_LEAST = 16  # outputs that Hopper's matrix instructions make at once


def projections(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """See `hf_packfree.ops.projections.projections`."""
    return _Projections.apply(x, *weights)  # type: ignore[no-any-return]


class _Projections(Operation):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        outs: list[Tensor] = []
        for run in _runs(weights):
            outs += narrow(x, weights[run]) if weights[run][0].shape[0] < NARROW else [product(x, weights[run][0])]
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outs: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        with as_in_forward(x):
            return _gradients(x, weights, d_outs, ctx.needs_input_grad)


def narrow(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return x weight' of each weight of few outputs; in fp32 and fp64 torch's library multiplies."""
    if x.dtype not in HALF:
        return list(_parted(product(x, _joined(weights, 0)), weights, -1))
    rows = x.flatten(0, -2)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    outs = [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]
    at_once = 2 if max(weight.shape[0] for weight in weights) <= _PAIR else 1
    for i in range(0, len(weights), at_once):
        _launch(rows, weights[i : i + at_once], outs[i : i + at_once])
    return outs


def _launch(x: Tensor, weights: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """One or two products of x [T, D]."""
    from hf_packfree.ops.projections import triton_kernels as kernels

    (tokens, size), first, last = x.shape, weights[0].contiguous(), weights[-1].contiguous()
    sizes = first.shape[0], last.shape[0]
    width = block_width(max(*sizes, _LEAST))
    depth = _DEPTH[width]
    launch(
        kernels.narrow, (-(-tokens // _ROWS),), x, first, last, outs[0], outs[-1], tokens, x.stride(0), size, *sizes,
        WIDTH=width, PAIR=len(weights) == 2, EVEN=size % depth == 0, ROWS=_ROWS, DEPTH=depth, num_warps=4, num_stages=3,
    )


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
    narrow = [weight.shape[0] < NARROW for weight in weights]
    starts = [i for i in range(len(weights)) if i == 0 or not (narrow[i] and narrow[i - 1])]
    return [slice(*ends) for ends in zip(starts, [*starts[1:], len(weights)], strict=True)]


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)


def _parted(joint: Tensor, weights: Sequence[Tensor], dim: int) -> Sequence[Tensor]:
    return [joint] if len(weights) == 1 else joint.split([weight.shape[0] for weight in weights], dim)
