"""The two gates of the delta rule, decay and write strength.

Only the inputs are kept for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.ops.backend import block_width, uses_triton
from hf_packfree.ops.fused.reduce import sum_partials
from hf_packfree.ops.launch import launch

# elements of a program
_BLOCK = 2048


def gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, backend: str = "torch"
) -> tuple[Tensor, Tensor]:
    """Return the log decay -exp(A_log) * softplus(a + dt_bias) and the write strength sigmoid(b)
    (arXiv:2412.06464).

    Args:
        a, b: [1, T, HV], any floating dtype, any strides.
        A_log, dt_bias: [HV], any floating dtype.
        backend: "triton" or "torch".

    Returns:
        g [1, T, HV] in fp32, as upstream has it: in fp16 the exponential overflows; and beta [1, T,
        HV] in b's dtype.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    run = _Gates.apply if uses_triton("gates", backend) else gates_reference
    return run(a, b, A_log, dt_bias)


def gates_reference(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """`gates` in PyTorch."""
    return -A_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.sigmoid()


class _Gates(Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        from hf_packfree.ops.fused.kernels.gates import gates

        A_log, dt_bias = A_log.contiguous(), dt_bias.contiguous()
        ctx.save_for_backward(a, b, A_log, dt_bias)
        g, beta = a.new_empty(a.shape, dtype=torch.float32), b.new_empty(b.shape)
        grid, sizes, blocks = _blocks(a, b)
        launch(gates, grid, a, b, A_log, dt_bias, g, beta, *sizes, **blocks)
        return g, beta

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_g: Tensor, d_beta: Tensor) -> tuple[Tensor | None, ...]:
        from hf_packfree.ops.fused.kernels.gates import gates_backward

        a, b, A_log, dt_bias = ctx.saved_tensors
        d_a, d_b = a.new_empty(a.shape), b.new_empty(b.shape)
        grid, sizes, blocks = _blocks(a, b)
        needed = any(ctx.needs_input_grad[2:])
        d_shared = a.new_empty(*grid, 2, a.shape[2], dtype=torch.float32) if needed else None
        launch(
            gates_backward,
            grid,
            a,
            b,
            A_log,
            dt_bias,
            d_g.contiguous(),
            d_beta.contiguous(),
            d_a,
            d_b,
            d_shared,
            *sizes,
            **blocks,
        )
        if d_shared is None:
            return d_a, d_b, None, None
        d_A_log, d_dt_bias = sum_partials(d_shared, torch.promote_types(A_log.dtype, dt_bias.dtype))
        return d_a, d_b, d_A_log.to(A_log.dtype), d_dt_bias.to(dt_bias.dtype)


def _blocks(a: Tensor, b: Tensor) -> tuple[tuple[int], tuple[int, ...], dict[str, int]]:
    """The grid, the sizes and strides that the kernels take, and their `tl.constexpr` arguments."""
    _, tokens, heads = a.shape
    width = block_width(heads)
    rows = max(1, _BLOCK // width)
    sizes = (tokens, heads, a.stride(1), a.stride(2), b.stride(1), b.stride(2))
    return (-(-tokens // rows),), sizes, {"ROWS": rows, "WIDTH": width, "num_warps": 4}
