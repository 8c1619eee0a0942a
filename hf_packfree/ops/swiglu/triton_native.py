"""The MLP on torch's matrix products and our Triton kernels.

The gated product is made again in the backward pass, by the kernel that reads gate and up there anyway: a sixth memory
pass over [T, F] instead of keeping it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_packfree.ops.launch import launch
from hf_packfree.ops.operation import Operation
from hf_packfree.ops.product import product, product_backward

_BLOCK = 2048  # elements of a program


def swiglu_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """See `hf_packfree.ops.swiglu.swiglu_mlp`."""
    return _SwiGLU.apply(x, gate, up, down)  # type: ignore[no-any-return]


class _SwiGLU(Operation):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        from hf_packfree.ops.swiglu.triton_kernels import gated

        a, b = product(x, gate), product(x, up)
        ctx.save_for_backward(x, gate, up, down, a, b)
        mixed = torch.empty_like(a)
        _run(gated, a, b, mixed)
        return product(mixed, down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, a, b = ctx.saved_tensors
        *wanted, wants_down = ctx.needs_input_grad
        return product_backward(d_y, down, partial(_gradients, x, gate, up, a, b, wanted), wants_down)


def _gradients(
    x: Tensor, gate: Tensor, up: Tensor, a: Tensor, b: Tensor, wanted: list[bool], d_mixed: Tensor, remakes: bool
) -> tuple[tuple[Tensor | None, ...], Tensor | None]:
    """Those of x, gate and up, as far as they are wanted, and where it `remakes` the gated product."""
    from hf_packfree.ops.swiglu.triton_kernels import gated_backward

    d_a, d_b = torch.empty_like(d_mixed), torch.empty_like(d_mixed)
    _run(gated_backward, a, b, d_mixed, d_a, d_b)  # which leaves the gated product in d_mixed's place
    wants_x, wants_gate, wants_up = wanted
    rows = x.flatten(0, -2)
    d_x = (d_a @ gate).addmm_(d_b, up).view_as(x) if wants_x else None
    d_gate, d_up = (d.T @ rows if wants else None for d, wants in ((d_a, wants_gate), (d_b, wants_up)))
    return (d_x, d_gate, d_up), d_mixed if remakes else None


def _run(kernel: Any, a: Tensor, *others: Tensor) -> None:
    sizes = a.numel() // a.shape[-1], a.shape[-1]
    launch(kernel, (-(-a.numel() // _BLOCK),), a, *others, *sizes, BLOCK=_BLOCK, num_warps=8)
