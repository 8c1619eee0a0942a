"""The products of linear layers without biases; on request a row's result does not depend on the
number of rows.

cuBLAS may choose split-K where a product has few output tiles, so a row's result depends on the
number of rows. For batch invariance, inputs of few rows are padded to a number for which it does
not, and layers of few outputs use `narrow_linear`, our kernel that never splits its sums. That
kernel also reads x once for two layers, so neighbouring narrow layers use it on a GPU in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from hf_packfree.ops.backend import HALF, block_width
from hf_packfree.ops.launch import launch

NARROW = 128
"""Layers of fewer outputs are narrow: reading x, or adding to its gradient, takes most of their
time, so neighbours are computed together.
"""
_MIN_ROWS = 1024
"""With fewer rows, cuBLAS may choose split-K; with this many or more it did not for the published
models' wide layers on an H200 (tests/gpu/test_ops.py).
"""
COMPARED = frozenset(
    {
        # 0.8B
        (6144, 1024),
        (4096, 1024),
        (2048, 1024),
        (512, 1024),
        (3584, 1024),
        (1024, 2048),
        (1024, 3584),
        # 2B
        (6144, 2048),
        (4096, 2048),
        (2048, 2048),
        (512, 2048),
        (2048, 6144),
        # 4B
        (9216, 2560),
        (8192, 2560),
        (4096, 2560),
        (1024, 2560),
        (2560, 4096),
        (2560, 9216),
        # 9B
        (12288, 4096),
        (8192, 4096),
        (4096, 4096),
        (1024, 4096),
        (4096, 12288),
        # 27B
        (17408, 5120),
        (12288, 5120),
        (10240, 5120),
        (6144, 5120),
        (1024, 5120),
        (5120, 6144),
        (5120, 17408),
    }
)
"""(outputs, inputs) of the layers of Qwen3.5 that tests/gpu/test_ops.py compared: with that many
rows or more, the bits of a row do not depend on their number.
"""
# tokens of a program
_ROWS = 64
# inputs of a tile, by outputs of a tile: what fits in shared memory
_DEPTH = {16: 128, 32: 128, 64: 64, 128: 64}
# most outputs of a layer that shares a program with another: the shared memory of small GPUs (99
# KiB) holds no more
_PAIR = 64
# outputs of one of Hopper's matrix instructions
_MIN_WIDTH = 16


def rows_of(x: Tensor) -> Tensor:
    """Return x [..., D] as rows [T, D]. For a packed row that is one call of torch's dispatcher,
    where `flatten` makes three.
    """
    return x.view(x.shape[1:]) if x.ndim == 3 and x.shape[0] == 1 else x.flatten(0, -2)


def as_leading(rows: Tensor, x: Tensor) -> Tensor:
    """Return rows [T, F] as [..., F], as x [..., D] was before `rows_of`; of no tokens, too, where
    torch cannot infer a size.
    """
    return rows.view(*x.shape[:-1], rows.shape[-1])


def linear_forward(x: Tensor, weight: Tensor, batch_invariant: bool) -> Tensor:
    """Return x weight^T, [..., D] to [..., F]; `batch_invariant`: in half precision on CUDA, fewer
    than `_MIN_ROWS` rows are padded to that many.
    """
    # `data_ptr` raises for tensors without memory
    _ = x.data_ptr(), weight.data_ptr()
    short = (
        batch_invariant and x.is_cuda and x.dtype in HALF and x.numel() // x.shape[-1] < _MIN_ROWS
    )
    return pad_rows(x, weight) if short else linear(x, weight)


def pad_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight^T [..., F], from a product with x padded by zeros to `_MIN_ROWS` rows;
    without an autograd graph.
    """
    flat = rows_of(x)
    rows = linear(pad(flat, (0, 0, 0, _MIN_ROWS - flat.shape[0])), weight)[: flat.shape[0]]
    # `.data`: autograd must not take the output for a view, because hooks may change it in place
    return as_leading(rows, x).data


def autocast_as_in_forward(x: Tensor) -> AbstractContextManager[Any]:
    """Run a backward pass without autocast, as its forward pass ran, even if backward is called
    under autocast.
    """
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def narrow_linear(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return x weight^T [..., F] for each weight [F, D] of few outputs; x and weights in half
    precision.
    """
    rows = rows_of(x)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    outs = [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]
    step = 2 if max(weight.shape[0] for weight in weights) <= _PAIR else 1
    for i in range(0, len(weights), step):
        _launch_narrow(rows, weights[i : i + step], outs[i : i + step])
    return outs


def _launch_narrow(x: Tensor, weights: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Launch the products of x [T, D] with one or two weights."""
    from hf_packfree.ops.fused.kernels.linear import narrow_linear

    (tokens, size), first, last = x.shape, weights[0].contiguous(), weights[-1].contiguous()
    sizes = first.shape[0], last.shape[0]
    width = block_width(max(*sizes, _MIN_WIDTH))
    depth = _DEPTH[width]
    launch(
        narrow_linear,
        (-(-tokens // _ROWS),),
        x,
        first,
        last,
        outs[0],
        outs[-1],
        tokens,
        x.stride(0),
        size,
        *sizes,
        WIDTH=width,
        PAIR=len(weights) == 2,
        EVEN=size % depth == 0,
        ROWS=_ROWS,
        DEPTH=depth,
        num_warps=4,
        num_stages=3,
    )
