"""The matrix product of a linear layer, never of so few rows that the library takes other kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

_ROWS = 256
"""Measured on an H200: below 129 rows torch's library takes other kernels, which sum in another order; above, the same bits."""


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight', [..., D] to [..., F]; on CUDA a document in a short row of its own gets the bits of a long one."""
    rows = x.numel() // x.shape[-1]
    if not x.is_cuda or rows >= _ROWS:
        return linear(x, weight)
    return filled(x, weight)


def filled(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight' from a product of `_ROWS` rows, zeros behind x's own."""
    flat = x.flatten(0, -2)
    return linear(pad(flat, (0, 0, 0, _ROWS - len(flat))), weight)[: len(flat)].view(*x.shape[:-1], -1)


def as_in_forward(x: Tensor) -> AbstractContextManager[Any]:
    """Let a backward pass whose forward ran without autocast run without it too, wherever it is called."""
    return torch.autocast(x.device.type, enabled=False)
