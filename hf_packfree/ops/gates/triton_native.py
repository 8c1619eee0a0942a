"""The gates of the delta rule on our Triton kernels: nothing is kept for the backward pass but what comes in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_packfree.ops.backend import block_width
from hf_packfree.ops.launch import launch
from hf_packfree.ops.operation import Operation
from hf_packfree.ops.partial_sums import summed

_ELEMENTS = 2048  # of a program


def gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `hf_packfree.ops.gates.gates`."""
    return _Gates.apply(a, b, A_log, dt_bias, rows)  # type: ignore[no-any-return]


class _Gates(Operation):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        from hf_packfree.ops.gates.triton_kernels import gates

        ctx.save_for_backward(a, b, A_log, dt_bias, rows)
        g, beta = a.new_empty(a.shape, dtype=torch.float32), b.new_empty(b.shape)
        grid, sizes, blocks = _blocks(a, b)
        launch(gates, grid, a, b, A_log, dt_bias, rows, g, beta, *sizes, MOVED=rows is not None, **blocks)
        return g, beta

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_g: Tensor, d_beta: Tensor) -> tuple[Tensor | None, ...]:
        from hf_packfree.ops.gates.triton_kernels import gates_backward

        a, b, A_log, dt_bias, rows = ctx.saved_tensors
        d_a, d_b = a.new_empty(a.shape), b.new_empty(b.shape)
        grid, sizes, blocks = _blocks(a, b)
        d_shared = a.new_empty(*grid, 2, a.shape[2], dtype=torch.float32)
        launch(
            gates_backward, grid, a, b, A_log, dt_bias, rows, d_g.contiguous(), d_beta.contiguous(), d_a, d_b, d_shared,
            *sizes, MOVED=rows is not None, **blocks,
        )
        d_A_log, d_dt_bias = summed(d_shared, torch.promote_types(A_log.dtype, dt_bias.dtype))
        return d_a, d_b, d_A_log.to(A_log.dtype), d_dt_bias.to(dt_bias.dtype), None


def _blocks(a: Tensor, b: Tensor) -> tuple[tuple[int], tuple[int, ...], dict[str, int]]:
    """The grid, the sizes and strides that the kernels take, and what a program is compiled for."""
    _, tokens, heads = a.shape
    width = block_width(heads)
    rows = max(1, _ELEMENTS // width)
    sizes = (tokens, heads, a.stride(1), a.stride(2), b.stride(1), b.stride(2))
    return (-(-tokens // rows),), sizes, {"ROWS": rows, "WIDTH": width, "num_warps": 4}
