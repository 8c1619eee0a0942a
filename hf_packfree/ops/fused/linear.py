"""Linear layers without biases: several of one tensor, and products whose rows do not depend on how many there are.

cuBLAS may choose split-K where a product has few output tiles, so a row's result depends on the number of rows.  With
`batch_invariant=True` short rows are padded until it does not, and `narrow_linear`, for few outputs, is a kernel of ours that
never splits its sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad

from hf_packfree.ops.backend import HALF, block_width, uses_triton
from hf_packfree.ops.launch import launch
from hf_packfree.ops.operation import Operation

NARROW = 128
"""Layers of fewer outputs: their products wait for x and its gradient to be read, so neighbours read them together."""
_MIN_ROWS = 1024
"""Below, cuBLAS may choose split-K; from here on it did not for the published models' wide layers on an H200
(tests/gpu/test_ops.py)."""
_ROWS = 64  # tokens of a program
_DEPTH = {16: 128, 32: 128, 64: 64, 128: 64}  # inputs of a tile, by outputs of a tile: what fits in shared memory
_PAIR = 64  # most outputs of a layer that shares a program with another: the shared memory of small GPUs (99 KiB) holds no more
_MIN_WIDTH = 16  # outputs of one of Hopper's matrix instructions

Recompute = Callable[[Tensor, bool], tuple[tuple[Tensor | None, ...], Tensor | None]]


def projections(
    x: Tensor, *weights: Tensor, batch_invariant: bool = False, backend: str = "torch"
) -> tuple[Tensor, ...]:
    """Return x weight' of each weight; "triton" sums the gradients of x inside the matrix products.

    Args:
        x: [..., D], any floating dtype.
        weights: [F, D] each, in x's dtype.
        batch_invariant: with "triton", a row of x gives the same result among any number of rows.
        backend: "triton" or "torch".

    Returns:
        [..., F] each, in x's dtype.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    if uses_triton("projections", backend):
        return _Projections.apply(batch_invariant, x, *weights)  # type: ignore[no-any-return]
    return tuple(linear(x, weight) for weight in weights)


def linear_forward(x: Tensor, weight: Tensor, batch_invariant: bool) -> Tensor:
    """Return x weight', [..., D] to [..., F]; `batch_invariant`: in half precision on CUDA few rows are padded to many."""
    _ = x.data_ptr(), weight.data_ptr()  # raises where there is no memory, see `Operation`
    short = batch_invariant and x.is_cuda and x.dtype in HALF and x.numel() // x.shape[-1] < _MIN_ROWS
    return pad_rows(x, weight) if short else linear(x, weight)


def pad_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight' from a product of `_MIN_ROWS` rows, zeros behind x's own."""
    flat = x.flatten(0, -2)
    return linear(pad(flat, (0, 0, 0, _MIN_ROWS - flat.shape[0])), weight)[: flat.shape[0]].view(*x.shape[:-1], -1)


def linear_backward(d_out: Tensor, weight: Tensor, recompute: Recompute, needs_weight: bool) -> tuple[Tensor | None, ...]:
    """Return the gradients of what a linear layer's input x was computed from, and last of its weight [F, D].

    Args:
        d_out: [..., F], the gradient of the layer's output.
        recompute: given the gradient of x [T, D], and whether x is needed, returns the gradients of what x was computed
            from, and x recomputed or None.
        needs_weight: whether the weight's gradient is needed.
    """
    with autocast_as_in_forward(d_out):
        flat = d_out.flatten(0, -2)
        gradients, x = recompute(flat @ weight, needs_weight)
        return *gradients, None if x is None else flat.T @ x.view(flat.shape[0], -1)


def autocast_as_in_forward(x: Tensor) -> AbstractContextManager[Any]:
    """Run a backward pass without autocast, as its forward pass ran, wherever it is called."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


class _Projections(Operation):
    @staticmethod
    def forward(ctx: Any, batch_invariant: bool, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        outs: list[Tensor] = []
        for group in _groups(weights):
            if batch_invariant and weights[group][0].shape[0] < NARROW and x.dtype in HALF:
                outs += narrow_linear(x, weights[group])
            else:
                outs += [linear_forward(x, weight, batch_invariant) for weight in weights[group]]
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outs: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        with autocast_as_in_forward(x):
            return None, *_gradients(x, weights, d_outs, ctx.needs_input_grad[1:])


def narrow_linear(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return x weight' of each weight of few outputs, in half precision."""
    rows = x.flatten(0, -2)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    outs = [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]
    step = 2 if max(weight.shape[0] for weight in weights) <= _PAIR else 1
    for i in range(0, len(weights), step):
        _launch_narrow(rows, weights[i : i + step], outs[i : i + step])
    return outs


def _launch_narrow(x: Tensor, weights: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """One or two products of x [T, D]."""
    from hf_packfree.ops.fused.kernels.linear import narrow_linear

    (tokens, size), first, last = x.shape, weights[0].contiguous(), weights[-1].contiguous()
    sizes = first.shape[0], last.shape[0]
    width = block_width(max(*sizes, _MIN_WIDTH))
    depth = _DEPTH[width]
    launch(
        narrow_linear, (-(-tokens // _ROWS),), x, first, last, outs[0], outs[-1], tokens, x.stride(0), size, *sizes,
        WIDTH=width, PAIR=len(weights) == 2, EVEN=size % depth == 0, ROWS=_ROWS, DEPTH=depth, num_warps=4, num_stages=3,
    )


def _gradients(
    x: Tensor, weights: Sequence[Tensor], d_outs: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Those of x and of the weights, as far as they are needed."""
    rows, needs_x, needs_weight = x.flatten(0, -2), needed[0], needed[1:]
    d_x: Tensor | None = None
    d_weights: list[Tensor | None] = [None] * len(weights)
    # Narrowest first: `addmm_` reads and writes all of d_x, which the narrow product would wait for.
    for group in sorted(_groups(weights), key=lambda group: sum(weight.shape[0] for weight in weights[group])):
        d_out = _cat(d_outs[group], -1).flatten(0, -2)
        if needs_x:
            weight = _cat(weights[group], 0)
            d_x = d_out @ weight if d_x is None else d_x.addmm_(d_out, weight)
        if any(needs_weight[group]):
            d_weights[group] = _split(d_out.T @ rows, weights[group], 0)
    return None if d_x is None else d_x.view_as(x), *d_weights


def _groups(weights: Sequence[Tensor]) -> list[slice]:
    """Cut the layers into those multiplied as one: narrow neighbours together, every other one by itself."""
    narrow = [weight.shape[0] < NARROW for weight in weights]
    starts = [i for i in range(len(weights)) if i == 0 or not (narrow[i] and narrow[i - 1])]
    return [slice(*ends) for ends in zip(starts, [*starts[1:], len(weights)], strict=True)]


def _cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)


def _split(joint: Tensor, weights: Sequence[Tensor], dim: int) -> Sequence[Tensor]:
    return [joint] if len(weights) == 1 else joint.split([weight.shape[0] for weight in weights], dim)


__all__ = ["NARROW", "autocast_as_in_forward", "linear_backward", "linear_forward", "narrow_linear", "pad_rows", "projections"]
