"""The Triton kernel of narrow products: every sum is one program's, in one order, however many rows there are."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _part(weight, output, depth, outputs, size, EVEN: tl.constexpr):
    """Columns `depth` of a weight's rows `output`, [WIDTH, DEPTH]; zeros beyond."""
    inside = output[:, None] < outputs
    if not EVEN:
        inside = inside & (depth[None, :] < size)
    return tl.load(weight + output[:, None] * size + depth[None, :], mask=inside, other=0.0)


@triton.jit
def _keep(out, sums, row, tokens, output, outputs):
    place = row[:, None].to(tl.int64) * outputs + output[None, :]
    inside = (row[:, None] < tokens) & (output[None, :] < outputs)
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def narrow(
    x, first, second, out, other, tokens, stride, size, outputs, others,
    WIDTH: tl.constexpr, PAIR: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):
    """out = x first' and, where PAIR, other = x second': x [tokens, size], weights [outputs, size] and [others, size].

    Grid: blocks of ROWS tokens.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output, depth = tl.arange(0, WIDTH), tl.arange(0, DEPTH)
    place = x + row[:, None].to(tl.int64) * stride + depth[None, :]
    sums, more = tl.zeros([ROWS, WIDTH], dtype=tl.float32), tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    for start in range(0, size, DEPTH):
        inside = row[:, None] < tokens
        if not EVEN:
            inside = inside & (start + depth[None, :] < size)
        tile = tl.load(place + start, mask=inside, other=0.0)
        sums = tl.dot(tile, tl.trans(_part(first, output, start + depth, outputs, size, EVEN)), sums)
        if PAIR:
            more = tl.dot(tile, tl.trans(_part(second, output, start + depth, others, size, EVEN)), more)
    _keep(out, sums, row, tokens, output, outputs)
    if PAIR:
        _keep(other, more, row, tokens, output, others)
