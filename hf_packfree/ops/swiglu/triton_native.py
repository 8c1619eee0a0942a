"""The MLP on torch's matrix products and our Triton kernels.

The gated product is made again in the backward pass, by the kernel that reads gate and up there anyway: a sixth memory
pass over [T, F] instead of keeping it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_packfree.ops.product import as_in_forward, product

_BLOCK = 2048  # elements of a program


def swiglu_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """See `hf_packfree.ops.swiglu.swiglu_mlp`."""
    return _SwiGLU.apply(x, gate, up, down)  # type: ignore[no-any-return,no-untyped-call]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        from hf_packfree.ops.swiglu.triton_kernels import gated

        a, b = product(x, gate), product(x, up)
        ctx.save_for_backward(x, gate, up, down, a, b)
        mixed = torch.empty_like(a)
        _launch(gated, a, b, mixed)
        return product(mixed, down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        with as_in_forward(d_y):
            flat = (t.flatten(0, -2) for t in (d_y, *ctx.saved_tensors))
            d_x, *d_weights = _gradients(ctx.needs_input_grad, *flat)
        return None if d_x is None else d_x.view(*d_y.shape[:-1], -1), *d_weights


def _gradients(
    needed: tuple[bool, ...], d_y: Tensor, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor | None, ...]:
    """Those of x and of the weights, as far as they are needed; all tensors [rows, channels]."""
    from hf_packfree.ops.swiglu.triton_kernels import gated_backward

    wants_x, wants_gate, wants_up, wants_down = needed
    d_mixed, d_a, d_b = d_y @ down, torch.empty_like(a), torch.empty_like(b)
    _launch(gated_backward, a, b, d_mixed, d_a, d_b)  # which leaves the gated product in d_mixed's place
    d_x = (d_a @ gate).addmm_(d_b, up) if wants_x else None
    d_gate, d_up = (d.T @ x if wanted else None for d, wanted in ((d_a, wants_gate), (d_b, wants_up)))
    return d_x, d_gate, d_up, d_y.T @ d_mixed if wants_down else None


def _launch(kernel: Any, a: Tensor, *others: Tensor) -> None:
    with torch.cuda.device_of(a):
        sizes = a.numel() // a.shape[-1], a.shape[-1]
        kernel[(-(-a.numel() // _BLOCK),)](a, *others, *sizes, BLOCK=_BLOCK, num_warps=8)
