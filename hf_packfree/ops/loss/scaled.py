"""A gradient times a scalar on its device, rounded once: in PyTorch, and in Triton."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_packfree.ops.launch import launch

Scaled = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`scaled` of a backend."""
# elements of a program
_BLOCK = 4096


def scaled(gradient: Tensor, factor: Tensor, like: Tensor) -> Tensor:
    """Return gradient * factor, fp32 inside, in the dtype of `like`.

    Args:
        gradient: fp32, or fp64.
        factor: what broadcasts to the gradient's shape.
    """
    out = torch.empty_like(gradient, dtype=like.dtype)
    return torch.mul(gradient, factor.to(gradient.dtype), out=out)


def triton_scaled(gradient: Tensor, factor: Tensor, like: Tensor) -> Tensor:
    """`scaled` in Triton for a scalar factor; the gradient must be contiguous.

    torch's kernel for a scalar on the device and a result of another dtype is not vectorized: 11%
    of head and loss for 2,048 tokens on an H200 (docs/performance.md).
    """
    from hf_packfree.ops.loss.triton_kernels import scaled as kernel

    if factor.ndim or gradient.dtype != torch.float32:
        return scaled(gradient, factor, like)
    out = torch.empty_like(gradient, dtype=like.dtype)
    grid = (-(-gradient.numel() // _BLOCK),)
    if gradient.numel():
        launch(kernel, grid, gradient, factor.float(), out, gradient.numel(), BLOCK=_BLOCK)
    return out
