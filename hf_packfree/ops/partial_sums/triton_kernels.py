"""The Triton kernel that adds up what programs have summed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["parts"])
def total(x, out, parts, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out [C] = the sum of x [P, C] over P.  Grid: blocks of COLUMNS."""
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, parts, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        sums += tl.load(x + row.to(tl.int64) * width + column, mask=(row < parts) & (column < width), other=0.0)
    tl.store(out + column, tl.sum(sums, 0)[None, :].to(out.dtype.element_ty), mask=column < width)
