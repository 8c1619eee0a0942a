"""Residual sum and the norm that reads it: RMS norm of decoder layers, layer norm of vision towers.

Launch sizes of the kernels are fixed, so that new row lengths tune nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import layer_norm

from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.ops.backend import block_width, uses_triton
from hf_packfree.ops.fused.reduce import sum_partials
from hf_packfree.ops.launch import launch
from hf_packfree.packing.marks import NORM, PADDED, SPARE_COLUMNS

# most rows of a program in the backward pass
_ROWS_PER_PROGRAM = 64
# fewest programs in the backward pass
_PROGRAMS = 512
# rows loaded ahead in the backward pass
_PREFETCH = 2
# bytes of the longest rows that are loaded ahead: shared memory holds three tensors' rows
_PREFETCH_BYTES = 8192


class NormOf(NamedTuple):
    """The inputs of a norm, for an op that reads the norm and recomputes it instead of keeping
    it.
    """

    total: Tensor
    weight: Tensor
    eps: float
    offset: float
    padded: Tensor | None = None
    """[..., D or more]: the tensor whose first D columns the norm is; the spare columns are for
    adapters' h.
    """

    @property
    def formula(self) -> tuple[float, float]:
        """Eps and offset, see `add_norm`."""
        return self.eps, self.offset

    def again(self, dtype: torch.dtype) -> Tensor:
        """Return the norm that "triton" computed in that dtype, bit for bit."""
        from hf_packfree.ops.fused.kernels.norms import add_norm

        total, weight, normed, size = (
            self.total,
            self.weight.contiguous(),
            torch.empty_like(self.total, dtype=dtype),
            self.total.shape[-1],
        )
        grid = (total.numel() // size,)
        launch(
            add_norm,
            grid,
            total,
            None,
            weight,
            None,
            total,
            normed,
            size,
            size,
            self.eps,
            OFFSET=self.offset,
            ADDS=False,
            **_blocks(size),
        )
        return normed


def remember(normed: Tensor, of: NormOf) -> None:
    """Mark a norm with its inputs, so that any op that reads the norm finds them, whatever code is
    in between.
    """
    tensors = normed, of.total, of.weight
    # inference tensors have no versions, and none can be kept for the backward pass
    if torch.is_grad_enabled() and not any([one.is_inference() for one in tensors]):
        NORM.put(normed, (_versions(normed, of), of))


def norm_of(x: Tensor) -> NormOf | None:
    """Return the inputs that `remember` marked x with, or None if x or one of them was changed in
    place since.
    """
    versions, of = NORM.of(x) or (None, None)
    return of if of is not None and versions == _versions(x, of) else None


def _versions(normed: Tensor, of: NormOf) -> tuple[int, int, int]:
    return normed._version, of.total._version, of.weight._version


def want_spare_columns(out: Tensor, columns: int) -> Tensor:
    """Mark a layer's output, so that the norm that reads it allocates its gradient with `columns`
    spare columns per row, for d_h; return the output.
    """
    if columns and torch.is_grad_enabled() and not out.is_inference():
        SPARE_COLUMNS.put(out, columns)
    return out


def take_padded(gradient: Tensor) -> Tensor | None:
    """Return the padded tensor whose first columns a gradient is, or None; only once, so that only
    one reader writes to the spare columns.
    """
    padded = PADDED.take(gradient)
    moved = (
        padded is None
        or padded.data_ptr() != gradient.data_ptr()
        or padded.stride() != gradient.stride()
    )
    return None if moved else padded


def add_norm(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 1.0,
    dtype: torch.dtype | None = None,
    spare_columns: int = 0,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Return total = x + branch, and total / sqrt(mean(total^2) + eps) * (offset + weight), in fp32
    at least.

    Args:
        x: [..., D], the residual stream, any floating dtype.
        branch: [..., D], added to x; None: the total is x, and the gradients of norm and total are
            summed all the same.
        weight: [D].
        eps: added to the mean square.
        offset: added to the weight: 1 as Qwen3-Next and Qwen3.5 do, 0 as Llama does.
        dtype: of the norm, that of the layers that read it; None: the total's.
        spare_columns: columns allocated after each row of the norm, with "triton": there a layer
            with adapters writes h, and needs no copy of the norm.
        backend: "triton" or "torch".

    Returns:
        normed: [..., D], computed from the rounded total and rounded once, as upstream's; rows are
            D + spare_columns elements apart.
        total: [..., D], rounded as torch's sum is.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    if uses_triton("residual and norm", backend):
        dtype = dtype or _of_sum(x, branch)
        padded = None
        if spare_columns:
            padded = x.new_empty(*x.shape[:-1], x.shape[-1] + spare_columns, dtype=dtype)
        spare = max([SPARE_COLUMNS.of(part) or 0 for part in (x, branch)])
        normed, total = _AddNorm.apply(x, branch, weight, None, eps, offset, dtype, padded, spare)
        remember(normed, NormOf(total, weight, eps, offset, padded))
        return normed, total
    return add_norm_reference(x, branch, weight, eps, offset, dtype)


def add_norm_reference(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    eps: float,
    offset: float = 1.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`add_norm` in PyTorch."""
    total = x if branch is None else x + branch
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * (offset + weight.to(wide.dtype))).to(dtype or total.dtype), total


def add_layer_norm(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    dtype: torch.dtype | None = None,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Return what `add_norm` does, with (total - mean) / sqrt(variance + eps) * weight + bias as
    the norm (Ba et al., arXiv:1607.06450).

    Args:
        bias: [D].
        x, branch, weight, eps, dtype, backend: see `add_norm`.
    """
    if uses_triton("residual and layer norm", backend):
        dtype = dtype or _of_sum(x, branch)
        return _AddNorm.apply(x, branch, weight, bias, eps, 0.0, dtype, None, 0)  # type: ignore[no-any-return]
    return add_layer_norm_reference(x, branch, weight, bias, eps, dtype)


def add_layer_norm_reference(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`add_layer_norm` in PyTorch."""
    total = x if branch is None else x + branch
    wide = torch.promote_types(total.dtype, torch.float32)
    normed = layer_norm(total.to(wide), weight.shape, weight.to(wide), bias.to(wide), eps)
    return normed.to(dtype or total.dtype), total


class _AddNorm(Function):
    """x and branch share one gradient, the sum of those that reach the total and the norm. With a
    bias it is a layer norm.

    If the branch is the output of a layer with adapters, this gradient has the spare columns that
    the layer asked for, see `want_spare_columns`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        offset: float,
        dtype: torch.dtype,
        padded: Tensor | None,
        spare: int,
    ) -> tuple[Tensor, Tensor]:
        from hf_packfree.ops.fused.kernels.norms import add_norm

        x, weight = x.contiguous(), weight.contiguous()
        bias, total = None if bias is None else bias.contiguous(), x
        if branch is not None:
            branch = branch.contiguous()
            total = torch.empty_like(x, dtype=_of_sum(x, branch))
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.offset, ctx.centered, ctx.spare = eps, offset, bias is not None, spare
        ctx.dtypes = x.dtype, None if branch is None else branch.dtype
        ctx.set_materialize_grads(False)
        size = stride = x.shape[-1]
        if padded is None:
            normed = torch.empty_like(total, dtype=dtype)
        else:
            # `.data` is no view to autograd, so writing h into the spare columns does not change
            # its version
            normed, stride = padded[..., :size].data, padded.shape[-1]
        grid = (x.numel() // size,)
        options = {"OFFSET": offset, "ADDS": branch is not None, **_blocks(size)}
        launch(add_norm, grid, x, branch, weight, bias, total, normed, size, stride, eps, **options)
        # without a branch the total is x itself, which autograd returns as a view with this
        # backward
        return normed, total

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_normed: Tensor | None, d_total: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        d, d_weight, d_bias = d_total, None, None
        if d_normed is not None:
            needed = ctx.needs_input_grad[2:4]
            d, d_weight, d_bias = _gradients(total, weight, d_normed, d_total, ctx, needed)
        d_x, d_branch = [
            None if d is None or dtype is None else d.to(dtype) for dtype in ctx.dtypes
        ]
        return d_x, d_branch, d_weight, d_bias, *[None] * 5


def _of_sum(x: Tensor, branch: Tensor | None) -> torch.dtype:
    """The dtype of x + branch."""
    return x.dtype if branch is None else torch.promote_types(x.dtype, branch.dtype)


def _with_spare_columns(total: Tensor, spare: int) -> Tensor:
    """Allocate the gradient of the total, marked with the padded tensor if it has spare columns."""
    if not spare:
        return torch.empty_like(total)
    padded = total.new_empty(*total.shape[:-1], total.shape[-1] + spare)
    d = padded[..., : total.shape[-1]]
    PADDED.put(d, padded)
    return d


def _gradients(
    total: Tensor,
    weight: Tensor,
    d_normed: Tensor,
    d_total: Tensor | None,
    ctx: Any,
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of the total, d_total included, and of weight and bias where they are
    needed.
    """
    from hf_packfree.ops.fused.kernels.norms import add_norm_backward

    d, size = _with_spare_columns(total, ctx.spare), total.shape[-1]
    rows = total.numel() // size
    rows_per_program = max(1, min(_ROWS_PER_PROGRAM, rows // _PROGRAMS))
    programs = -(-rows // rows_per_program)
    d_weight, d_bias = [
        weight.new_empty(programs, size, dtype=torch.float32) if need else None for need in needed
    ]
    adds, stride = None, size
    if d_total is not None:
        adds = d_total.reshape(rows, size)
        adds = adds if adds.stride(1) == 1 else adds.contiguous()
        stride = adds.stride(0)
    launch(
        add_norm_backward,
        (programs,),
        total,
        weight,
        d_normed.contiguous(),
        adds,
        d,
        d_weight,
        d_bias,
        rows,
        size,
        stride,
        size + ctx.spare,
        ctx.eps,
        rows_per_program,
        OFFSET=ctx.offset,
        ADDS=adds is not None,
        CENTERED=ctx.centered,
        PREFETCH=_PREFETCH if size * total.itemsize <= _PREFETCH_BYTES else 0,
        **_blocks(size),
    )
    d_weight, d_bias = [
        None if parts is None else sum_partials(parts, weight.dtype) for parts in (d_weight, d_bias)
    ]
    return d, d_weight, d_bias


@cache
def _blocks(size: int) -> dict[str, int]:
    width = block_width(size)
    return {"WIDTH": width, "num_warps": min(max(width // 512, 1), 16)}
