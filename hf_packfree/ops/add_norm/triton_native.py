"""Residual sum and RMS norm on our Triton kernels; launch sizes are fixed, so that new row lengths tune nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_packfree.ops.backend import block_width
from hf_packfree.ops.launch import launch
from hf_packfree.ops.operation import Operation
from hf_packfree.ops.partial_sums import summed

_TILES, _PROGRAMS = 64, 512  # in the backward pass: rows of a program at most, programs at least
_AHEAD, _ROW = 2, 8192  # how many of them are asked for ahead, up to so many bytes each: shared memory holds three tensors'


def add_norm(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `hf_packfree.ops.add_norm.add_norm`."""
    return _AddNorm.apply(x, branch, weight, eps)  # type: ignore[no-any-return]


class _AddNorm(Operation):
    """Its inputs share one gradient, which is that of the residual stream and of the norm together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        from hf_packfree.ops.add_norm.triton_kernels import add_norm

        x = total = x.contiguous()
        if branch is not None:
            branch = branch.contiguous()
            total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, branch.dtype))
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.dtypes = eps, (x.dtype, None if branch is None else branch.dtype)
        ctx.set_materialize_grads(False)
        normed, size = torch.empty_like(total), x.shape[-1]
        grid = (x.numel() // size,)
        launch(add_norm, grid, x, branch, weight, total, normed, size, eps, ADDS=branch is not None, **_blocks(size))
        return normed, total  # x itself, where it is the total, goes out as a view with this gradient

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_normed: Tensor | None, d_total: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        d, d_weight = d_total, None
        if d_normed is not None:
            d, d_weight = _gradients(total, weight, d_normed, d_total, ctx.eps)
        d_x, d_branch = (None if d is None or dtype is None else d.to(dtype) for dtype in ctx.dtypes)
        return d_x, d_branch, d_weight, None


def _gradients(
    total: Tensor, weight: Tensor, d_normed: Tensor, d_total: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the total, d_total included, and of the weight."""
    from hf_packfree.ops.add_norm.triton_kernels import add_norm_backward

    d, size = torch.empty_like(total), total.shape[-1]
    rows = total.numel() // size
    tiles = max(1, min(_TILES, rows // _PROGRAMS))
    programs = -(-rows // tiles)
    d_weight = weight.new_empty(programs, size, dtype=torch.float32)
    adds = None if d_total is None else d_total.contiguous()
    launch(
        add_norm_backward, (programs,), total, weight, d_normed.contiguous(), adds, d, d_weight, rows, size, eps, tiles,
        ADDS=adds is not None, AHEAD=_AHEAD if size * total.itemsize <= _ROW else 0, **_blocks(size),
    )
    return d, summed(d_weight, weight.dtype)


def _blocks(size: int) -> dict[str, int]:
    width = block_width(size)
    return {"WIDTH": width, "num_warps": min(max(width // 512, 1), 16)}
