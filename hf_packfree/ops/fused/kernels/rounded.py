"""Triton kernels that round weights W [F, D] of one model, each at an address of its own: one finds
those that changed, the other rounds them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_changed(weights, sizes, always, places, seen, changed, BLOCK: tl.constexpr):
    """changed [N]: whether a weight is rounded always, or an element of it, one of each row and one
    of each column, has other bits than in `seen`, where it is written. Grid: weights.

    Args:
        weights: addresses [N].
        sizes: F, D and the copy's stride, [N, 3].
        places: of each weight's elements in `seen` [all F + D].
    """
    number = tl.program_id(0)
    weight = tl.load(weights + number).to(tl.pointer_type(tl.float32))
    rows, width = tl.load(sizes + 3 * number), tl.load(sizes + 3 * number + 1)
    mine = seen + tl.load(places + number)
    found = tl.load(always + number)
    for first in range(0, rows + width, BLOCK):
        i = first + tl.arange(0, BLOCK)
        mask = i < rows + width
        of_row = i < rows
        # the factors only spread the elements
        row = tl.where(of_row, i, (i * 89) % rows)
        column = tl.where(of_row, (i * 97) % width, i - rows)
        now = tl.load(weight + row.to(tl.int64) * width + column, mask=mask, other=0.0)
        before = tl.load(mine + i, mask=mask, other=0.0)
        differs = now.to(tl.int32, bitcast=True) != before.to(tl.int32, bitcast=True)
        found = tl.maximum(found, tl.max(differs.to(tl.int32), 0))
        tl.store(mine + i, now, mask=mask)
    tl.store(changed + number, found)


@triton.jit
def round_changed(
    weights,
    sizes,
    copies,
    changed,
    like,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round the weights that changed to their copies, in the dtype of `like`. Grid: blocks of ROWS
    rows of the tallest, weights.

    Args:
        weights, copies: addresses [N], multiples of 16.
        sizes: F, D and the copy's stride, [N, 3]: multiples of 1, WIDTH and STRIDE.
    """
    number = tl.program_id(1)
    rows = tl.load(sizes + 3 * number)
    width = tl.multiple_of(tl.load(sizes + 3 * number + 1), WIDTH)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    if (tl.load(changed + number) != 0) & (tl.program_id(0) * ROWS < rows):
        stride = tl.multiple_of(tl.load(sizes + 3 * number + 2), STRIDE)
        dtype = like.dtype.element_ty
        weight = tl.multiple_of(tl.load(weights + number), 16).to(tl.pointer_type(tl.float32))
        copy = tl.multiple_of(tl.load(copies + number), 16).to(tl.pointer_type(dtype))
        for first in range(0, width, BLOCK):
            column = first + tl.arange(0, BLOCK)[None, :]
            mask = (row < rows) & (column < width)
            at = row.to(tl.int64)
            value = tl.load(weight + at * width + column, mask=mask, other=0.0)
            tl.store(copy + at * stride + column, value.to(dtype), mask=mask)
