"""Products with a tensor some of whose elements are dropped out, for LoRA's adapters.

Each adapter has a mask of its own: stored, what is left of x would be written and read again by
each of them, in the forward pass, in the backward pass and in a recomputation. So the kernels of
the products draw the mask themselves; in other dtypes than half precision, of high ranks, and on
CPUs, what is left is stored.

Shapes: x [T, D], K columns of h.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_packfree.ops.backend import HALF, block_width
from hf_packfree.ops.dropout import drop
from hf_packfree.ops.fused.reduce import sum_partials
from hf_packfree.ops.launch import launch
from hf_packfree.ops.seeds import Seed

# tokens of a block, four times the kernels' ROWS
_TOKENS = 64
# columns of a program's block, and how many blocks of them a program of `times` reads
_COLUMNS = 64
_STEPS = 8
# programs of `gradient`, at least
_PROGRAMS = 528
_NARROWEST = 16
WIDEST = 256
"""The most columns of h for which kernels draw masks: of more, their tiles would not fit into the
shared memory of all GPUs, and partial sums would take more memory than what is left of x.
"""


class Mask(NamedTuple):
    """Which elements of a tensor are dropped out.

    Attributes:
        seed: what they are drawn from.
        probability: with which an element is dropped out.
        within: whether the kernels of the products draw it; decided once, because it is another
            mask then.
    """

    seed: Seed
    probability: float
    within: bool


def draws_within(A: Tensor, x: torch.dtype, dtype: torch.dtype, columns: int) -> bool:
    """Whether kernels draw the mask of an adapter A of x, in products in `dtype` of so many
    columns.
    """
    return x == dtype and dtype in HALF and columns <= WIDEST and _on_a_gpu(A)


def left(x: Tensor, mask: Mask | None) -> Tensor:
    """Return what a mask leaves of x, or all without one."""
    return x if mask is None else drop(x, mask.seed, mask.probability)


def times(x: Tensor, w: Tensor, mask: Mask, scaling: float, dtype: torch.dtype) -> Tensor:
    """Return scaling times what is left of x [T, D] times w' in `dtype`, [T, K], given w [K, D]."""
    from hf_packfree.ops.fused.kernels.masked import times_dropped

    x, w = _rows(x), w.contiguous()
    (tokens, width), K = x.shape, w.shape[0]
    parts = -(-width // (_STEPS * _COLUMNS))
    sums = x.new_empty(parts, tokens, K, dtype=torch.float32)
    drawn = mask.seed.of_row, mask.seed.number
    sizes = tokens, width, K, x.stride(0), float(scaling), float(mask.probability)
    options = {"COLUMNS": _COLUMNS, "STEPS": _STEPS, "WIDTH_K": _width_of(K), "num_warps": 4}
    launch(times_dropped, (_blocks(tokens), parts), x, w, sums, *drawn, *sizes, **options)
    return sum_partials(sums, dtype)


def gradient(d_h: Tensor, x: Tensor, mask: Mask, dtype: torch.dtype) -> Tensor:
    """Return d_h' times what is left of x in `dtype`, [K, D], given d_h [T, K] and x [T, D]."""
    from hf_packfree.ops.fused.kernels.masked import gradient_of_factor

    x, d_h = _rows(x), _rows(d_h)
    (tokens, width), K = x.shape, d_h.shape[1]
    columns, blocks = -(-width // (2 * _COLUMNS)), _blocks(tokens)
    steps = max(1, blocks * columns // _PROGRAMS)
    programs = -(-blocks // steps)
    sums = x.new_empty(programs, K, width, dtype=torch.float32)
    drawn = mask.seed.of_row, mask.seed.number
    sizes = tokens, width, K, x.stride(0), d_h.stride(0), steps, float(mask.probability)
    options = {"COLUMNS": 2 * _COLUMNS, "WIDTH_K": _width_of(K), "num_warps": 4}
    launch(gradient_of_factor, (columns, programs), x, d_h, sums, *drawn, *sizes, **options)
    return sum_partials(sums, dtype)


def add(total: Tensor | None, d_h: Tensor, w: Tensor, mask: Mask) -> Tensor:
    """Return what the mask leaves of d_h w, [T, D], plus `total`, which is changed; given
    d_h [T, K] and w [K, D].
    """
    from hf_packfree.ops.fused.kernels.masked import add_dropped

    d_h, w = _rows(d_h), w.contiguous()
    (tokens, K), width = d_h.shape, w.shape[1]
    out = d_h.new_empty(tokens, width) if total is None else total
    drawn = mask.seed.of_row, mask.seed.number
    sizes = tokens, width, K, d_h.stride(0), float(mask.probability)
    options = {"COLUMNS": 2 * _COLUMNS, "WIDTH_K": _width_of(K), "ADDED": total is not None}
    grid = _blocks(tokens), -(-width // (2 * _COLUMNS))
    launch(add_dropped, grid, d_h, w, out, *drawn, *sizes, **options, num_warps=4)
    return out


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _blocks(tokens: int) -> int:
    return -(-tokens // _TOKENS)


def _width_of(K: int) -> int:
    return block_width(max(K, _NARROWEST))


def _on_a_gpu(x: Tensor) -> bool:
    return x.is_cuda
