"""Unit keys and queries of a chunk, and the gradients of the raw ones."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_packfree.ops.chunked.scratch import Scratch

NORM_EPS = 1e-6


def normalise(x: Tensor, scale: float, space: Scratch) -> Tensor:
    """Multiply x [R, C, K] by scale / (its L2 norm), in place; return the factor [R, C, 1]."""
    square = torch.mul(x, x, out=space.like("temporary", x))
    norm = square.sum(-1, keepdim=True).add_(NORM_EPS).rsqrt_().mul_(scale)
    x.mul_(norm)
    return norm


def normalise_backward(
    d: Tensor, x: Tensor, norm: Tensor | float, square: float, space: Scratch
) -> None:
    """Turn the gradient d [R, C, K] of x into the gradient of raw, x before `normalise`, in place.

    For x = n raw with n = s / |raw|: d_raw = n (dx - x (x.dx) / s^2).

    Args:
        norm: n, or a number where raw had norm 1 already.
        square: 1 / s^2.
    """
    if isinstance(norm, float):
        d.mul_(norm)
        return
    along = torch.mul(d, x, out=space.like("temporary", d)).sum(-1, keepdim=True).mul_(-square)
    d.addcmul_(x, along).mul_(norm)
