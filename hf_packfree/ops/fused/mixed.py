"""Products of activations with the fp32 matrices of adapters, as exact as fp32 and on the tensor cores of half precision.

A bfloat16 tensor times an fp32 matrix is what fp32 cores compute, at a twentieth of the speed.  An fp32 number is the sum of
three bfloat16 numbers to 2^-24, so that the same product is three of half precision, side by side, summed in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PARTS = 3
"""Of 8 bits each: as many as fp32 has."""


def times(x: Tensor, w: Tensor) -> Tensor:
    """Return x w in w's dtype: x [M, K] in that or in half precision, w [K, N]."""
    if x.dtype == w.dtype:
        return x @ w
    if not on_tensor_cores(x):
        return x.to(w.dtype) @ w
    return wide_product(x, torch.cat(split(w, x.dtype), 1)).view(len(x), _PARTS, -1).sum(1)


def rounded_product(h: Tensor, w: Tensor, like: Tensor) -> Tensor:
    """Return h w, [M, K] and [K, N] of one dtype, in the dtype of `like`.

    fp32 becomes bfloat16 by three products along K, which leave out 2^-16 of the result.
    """
    if h.dtype == like.dtype or not on_tensor_cores(like):
        return (h @ w).to(like.dtype)
    (high, low, _), (top, rest, _) = split(h, like.dtype), split(w, like.dtype)
    return torch.cat((high, low, high), 1) @ torch.cat((top, top, rest), 0)


def on_tensor_cores(x: Tensor) -> bool:
    """Whether fp32 is taken apart for products with x: float16 has too few exponents to hold the parts."""
    return x.is_cuda and x.dtype == torch.bfloat16


def split(w: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return tensors of `dtype` whose sum is w, in fp32, to 2^-24 in bfloat16."""
    parts = [w.to(dtype)]
    for _ in range(_PARTS - 1):
        w = w - parts[-1]
        parts.append(w.to(dtype))
    return parts


def wide_product(x: Tensor, w: Tensor) -> Tensor:
    """Return x w in fp32, of half precision."""
    return torch.mm(x, w, out_dtype=torch.float32)


__all__ = ["rounded_product", "times"]
