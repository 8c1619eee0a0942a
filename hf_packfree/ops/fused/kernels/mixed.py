"""Triton kernels that take fp32 apart into numbers of half precision, for the products of low-rank adapters."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split(w, parts, count, width, PAIRED: tl.constexpr, BLOCK: tl.constexpr):
    """parts [count / width, 3, width]: high, middle and low part of w; where PAIRED, high, middle and high.  Grid: blocks."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    dtype = parts.dtype.element_ty
    a = tl.load(w + i, mask=mask, other=0.0)
    high = a.to(dtype)
    rest = a - high.to(tl.float32)
    middle = rest.to(dtype)
    last = high if PAIRED else (rest - middle.to(tl.float32)).to(dtype)
    part = parts + (i // width) * 3 * width + i % width
    tl.store(part, high, mask=mask)
    tl.store(part + width, middle, mask=mask)
    tl.store(part + 2 * width, last, mask=mask)


@triton.jit(do_not_specialize=["count"])
def in_pairs(wide, out, count, rank, ranks, out_stride, scale, BLOCK: tl.constexpr):
    """out = (high, high, low) of scale times the sum of three parts in `wide` [T, n, 3, r].  Grid: blocks of the sums.

    ranks: n r, of which a row of `out` begins `out_stride` elements after another.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    dtype = out.dtype.element_ty
    token, column = i // ranks, i % ranks
    place = (column // rank) * 3 * rank + column % rank
    part = wide + token * 3 * ranks + place
    total = tl.load(part, mask=mask, other=0.0)
    total += tl.load(part + rank, mask=mask, other=0.0)
    total += tl.load(part + 2 * rank, mask=mask, other=0.0)
    total *= scale
    high = total.to(dtype)
    pair = out + token * out_stride + place
    tl.store(pair, high, mask=mask)
    tl.store(pair + rank, high, mask=mask)
    tl.store(pair + 2 * rank, (total - high.to(tl.float32)).to(dtype), mask=mask)
