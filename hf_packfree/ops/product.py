"""The matrix product of a linear layer, never of so few rows that the library takes other kernels, and its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from hf_packfree.ops.backend import HALF

_ROWS = 1024
"""A product of so few rows that it keeps few of the GPU's processors busy is cut along its sums, which changes bits.  With more
rows than these, wide layers of the published models' sizes were not, on an H200 (tests/gpu/test_ops.py)."""


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight', [..., D] to [..., F]; in half precision on CUDA a short row gets the bits of a long one."""
    _ = x.data_ptr(), weight.data_ptr()  # raises where there is no memory, see `Operation`
    rows = x.numel() // x.shape[-1]
    if not x.is_cuda or rows >= _ROWS or x.dtype not in HALF:
        return linear(x, weight)
    return filled(x, weight)


def filled(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight' from a product of `_ROWS` rows, zeros behind x's own."""
    flat = x.flatten(0, -2)
    return linear(pad(flat, (0, 0, 0, _ROWS - flat.shape[0])), weight)[: flat.shape[0]].view(*x.shape[:-1], -1)


def as_in_forward(x: Tensor) -> AbstractContextManager[Any]:
    """Let a backward pass whose forward ran without autocast run without it too, wherever it is called."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


Remade = Callable[[Tensor, bool], tuple[tuple[Tensor | None, ...], Tensor | None]]


def product_backward(d_out: Tensor, weight: Tensor, remade: Remade, wanted: bool) -> tuple[Tensor | None, ...]:
    """Return the gradients of what a product's x was made of, and last of its weight [F, D].

    Args:
        d_out: [..., F], of the product.
        remade: given the gradient of x [T, D], and whether x is asked for, returns the gradients of what x was made of, and
            x itself once more or None.
        wanted: whether the weight's gradient is.
    """
    with as_in_forward(d_out):
        flat = d_out.flatten(0, -2)
        gradients, x = remade(flat @ weight, wanted)
        return *gradients, None if x is None else flat.T @ x.view(flat.shape[0], -1)
