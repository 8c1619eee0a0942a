"""The products of linear layers without biases, whose rows do not depend on how many there are
where that is wanted.

cuBLAS may choose split-K where a product has few output tiles, so a row's result depends on the
number of rows. Where that is not wanted, short rows are padded until it does not, and
`narrow_linear`, for few outputs, is a kernel of ours that never splits its sums. It also reads x
once for two layers, so neighbours run it on a GPU in any case.
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
"""Layers of fewer outputs: their products wait for x and its gradient to be read, so neighbours
read them together.
"""
_MIN_ROWS = 1024
"""Below, cuBLAS may choose split-K; from here on it did not for the published models' wide layers
on an H200 (tests/gpu/test_ops.py)."""
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
"""(outputs, inputs) of Qwen3.5's layers, whose products were compared there: the same bits in any
row of that many tokens.
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
    """Return x [..., D] as rows [T, D], for a packed row by one call of the dispatcher, which for
    `flatten` are three.
    """
    return x.view(x.shape[1:]) if x.ndim == 3 and x.shape[0] == 1 else x.flatten(0, -2)


def linear_forward(x: Tensor, weight: Tensor, batch_invariant: bool) -> Tensor:
    """Return x weight^T, [..., D] to [..., F]; `batch_invariant`: in half precision on CUDA few
    rows are padded to many.
    """
    # raises where there is no memory
    _ = x.data_ptr(), weight.data_ptr()
    short = (
        batch_invariant and x.is_cuda and x.dtype in HALF and x.numel() // x.shape[-1] < _MIN_ROWS
    )
    return pad_rows(x, weight) if short else linear(x, weight)


def pad_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight^T from a product of `_MIN_ROWS` rows, zeros after x's own; without a
    history.
    """
    flat = rows_of(x)
    rows = linear(pad(flat, (0, 0, 0, _MIN_ROWS - flat.shape[0])), weight)[: flat.shape[0]]
    # no view to autograd, which hooks may change in place
    return rows.view(*x.shape[:-1], -1).data


def autocast_as_in_forward(x: Tensor) -> AbstractContextManager[Any]:
    """Run a backward pass without autocast, as its forward pass ran, wherever it is called."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def narrow_linear(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return x weight^T of each weight of few outputs, in half precision."""
    rows = rows_of(x)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    outs = [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]
    step = 2 if max(weight.shape[0] for weight in weights) <= _PAIR else 1
    for i in range(0, len(weights), step):
        _launch_narrow(rows, weights[i : i + step], outs[i : i + step])
    return outs


def _launch_narrow(x: Tensor, weights: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """One or two products of x [T, D]."""
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


__all__ = [
    "COMPARED",
    "NARROW",
    "autocast_as_in_forward",
    "linear_forward",
    "narrow_linear",
    "pad_rows",
    "rows_of",
]
