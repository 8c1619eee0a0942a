"""The MLP of a decoder layer: PyTorch's matrix products around a fused gated product.

The gated product is recomputed in the backward pass, by the kernel that reads gate and up there anyway: a sixth memory pass
over [T, F] instead of keeping it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, silu

from hf_packfree.ops.backend import uses_triton
from hf_packfree.ops.fused.linear import linear_backward, linear_forward
from hf_packfree.ops.launch import launch
from hf_packfree.ops.operation import Operation

_BLOCK = 2048  # elements of a program


def swiglu_mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, batch_invariant: bool = False, backend: str = "torch"
) -> Tensor:
    """Return (silu(x gate') * (x up')) down' (Shazeer, arXiv:2002.05202), each factor rounded as upstream's MLP does.

    Args:
        x: [..., D], any floating dtype.
        gate, up: [F, D], in x's dtype.
        down: [D, F], in x's dtype.
        batch_invariant: with "triton", a token gets the same result in a row of any length, see `hf_packfree.ops.fused.linear`.
        backend: "triton" or "torch".

    Returns:
        [..., D] in x's dtype.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    if uses_triton("swiglu", backend):
        return _SwiGLU.apply(x, gate, up, down, batch_invariant)  # type: ignore[no-any-return]
    return linear(silu(linear(x, gate)) * linear(x, up), down)


class _SwiGLU(Operation):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, batch_invariant: bool) -> Tensor:
        from hf_packfree.ops.fused.kernels.swiglu import swiglu

        a, b = (linear_forward(x, weight, batch_invariant) for weight in (gate, up))
        ctx.save_for_backward(x, gate, up, down, a, b)
        gated = torch.empty_like(a)
        _run(swiglu, a, b, gated)
        return linear_forward(gated, down, batch_invariant)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, a, b = ctx.saved_tensors
        *needed, needs_down = ctx.needs_input_grad[:4]
        return *linear_backward(d_y, down, partial(_gradients, x, gate, up, a, b, needed), needs_down), None


def _gradients(
    x: Tensor, gate: Tensor, up: Tensor, a: Tensor, b: Tensor, needed: list[bool], d_gated: Tensor, recompute: bool
) -> tuple[tuple[Tensor | None, ...], Tensor | None]:
    """Those of x, gate and up, as far as they are needed, and the gated product itself where it is to `recompute`."""
    from hf_packfree.ops.fused.kernels.swiglu import swiglu_backward

    d_a, d_b = torch.empty_like(d_gated), torch.empty_like(d_gated)
    _run(swiglu_backward, a, b, d_gated, d_a, d_b)  # overwrites d_gated with the gated product
    needs_x, needs_gate, needs_up = needed
    rows = x.flatten(0, -2)
    d_x = (d_a @ gate).addmm_(d_b, up).view_as(x) if needs_x else None
    d_gate, d_up = (d.T @ rows if needs else None for d, needs in ((d_a, needs_gate), (d_b, needs_up)))
    return (d_x, d_gate, d_up), d_gated if recompute else None


def _run(kernel: Any, a: Tensor, *others: Tensor) -> None:
    sizes = a.numel() // a.shape[-1], a.shape[-1]
    launch(kernel, (-(-a.numel() // _BLOCK),), a, *others, *sizes, BLOCK=_BLOCK, num_warps=8)


__all__ = ["swiglu_mlp"]
