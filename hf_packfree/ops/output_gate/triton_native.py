"""The output gate on our Triton kernels: x and z are kept for the backward pass, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_packfree.ops.backend import block_width

_ELEMENTS = 4096  # of a program


def output_gate(x: Tensor, z: Tensor) -> Tensor:
    """See `hf_packfree.ops.output_gate.output_gate`."""
    return _OutputGate.apply(x, z)  # type: ignore[no-any-return,no-untyped-call]


class _OutputGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor) -> Tensor:
        from hf_packfree.ops.output_gate.triton_kernels import gate

        x, z = x.contiguous(), z if z.stride(3) == 1 else z.contiguous()
        ctx.save_for_backward(x, z)
        out = torch.empty_like(x)
        grid, sizes, launch = _launch(z)
        with torch.cuda.device_of(x):
            gate[grid](x, z, out, *sizes, **launch)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        from hf_packfree.ops.output_gate.triton_kernels import gate_backward

        x, z = ctx.saved_tensors
        d_x, d_z = torch.empty_like(x), z.new_empty(z.shape)
        grid, sizes, launch = _launch(z)
        with torch.cuda.device_of(x):
            gate_backward[grid](x, z, d_out.contiguous(), d_x, d_z, *sizes, **launch)
        return d_x, d_z


def _launch(z: Tensor) -> tuple[tuple[int], tuple[int, ...], dict[str, int]]:
    _, tokens, heads, size = z.shape
    width = block_width(size)
    rows = max(1, _ELEMENTS // width)
    sizes = (tokens, heads, size, z.stride(1), z.stride(2))
    return (-(-tokens * heads // rows),), sizes, {"ROWS": rows, "WIDTH": width, "num_warps": 4}
