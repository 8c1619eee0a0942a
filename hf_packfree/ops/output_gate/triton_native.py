"""The output gate on our Triton kernels: x and z are kept for the backward pass, and nothing else.

Where a projection reads the product, the backward pass makes it again in the kernel that reads x and z there anyway.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_packfree.ops.backend import block_width
from hf_packfree.ops.launch import launch
from hf_packfree.ops.operation import Operation
from hf_packfree.ops.product import product, product_backward

_ELEMENTS = 4096  # of a program


def output_gate(x: Tensor, z: Tensor, projection: Tensor | None = None) -> Tensor:
    """See `hf_packfree.ops.output_gate.output_gate`."""
    return _OutputGate.apply(x, z, projection)  # type: ignore[no-any-return]


class _OutputGate(Operation):
    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, projection: Tensor | None) -> Tensor:
        from hf_packfree.ops.output_gate.triton_kernels import gate

        x, z = x.contiguous(), z if z.stride(3) == 1 else z.contiguous()
        ctx.save_for_backward(x, z, projection)
        out = torch.empty_like(x)
        grid, sizes, blocks = _blocks(z)
        launch(gate, grid, x, z, out, *sizes, **blocks)
        return out if projection is None else product(out.flatten(2), projection)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, z, projection = ctx.saved_tensors
        remade = partial(_gradients, x, z)
        if projection is None:
            return *remade(d_out.contiguous(), False)[0], None
        return product_backward(d_out, projection, remade, ctx.needs_input_grad[2])


def _gradients(x: Tensor, z: Tensor, d_gated: Tensor, remakes: bool) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """Those of x and z, and where it `remakes` their product."""
    from hf_packfree.ops.output_gate.triton_kernels import gate_backward

    d_x, d_z = torch.empty_like(x), z.new_empty(z.shape)
    made = torch.empty_like(x) if remakes else None
    grid, sizes, blocks = _blocks(z)
    launch(gate_backward, grid, x, z, d_gated, made, d_x, d_z, *sizes, REMAKES=remakes, **blocks)
    return (d_x, d_z), made


def _blocks(z: Tensor) -> tuple[tuple[int], tuple[int, ...], dict[str, int]]:
    _, tokens, heads, size = z.shape
    width = block_width(size)
    rows = max(1, _ELEMENTS // width)
    sizes = (tokens, heads, size, z.stride(1), z.stride(2))
    return (-(-tokens * heads // rows),), sizes, {"ROWS": rows, "WIDTH": width, "num_warps": 4}
