"""The Triton kernel that adds up the programs' partial sums."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def sum_partials(x, out, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out [C] = the sum of x [P, C] over P.  Grid: blocks of COLUMNS."""
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        acc += tl.load(x + row.to(tl.int64) * width + column, mask=(row < count) & (column < width), other=0.0)
    tl.store(out + column, tl.sum(acc, 0)[None, :].to(out.dtype.element_ty), mask=column < width)
