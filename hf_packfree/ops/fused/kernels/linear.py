"""Triton kernels of narrow matrix products, where one program adds a sum in the same order for any
number of rows, and of adding up partial sums.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_weight(weight, output, depth, outputs, size, EVEN: tl.constexpr):
    """Columns `depth` of a weight's rows `output`, [WIDTH, DEPTH]; zeros beyond."""
    mask = output[:, None] < outputs
    if not EVEN:
        mask = mask & (depth[None, :] < size)
    return tl.load(weight + output[:, None] * size + depth[None, :], mask=mask, other=0.0)


@triton.jit
def _store(out, acc, row, tokens, output, outputs):
    offset = row[:, None].to(tl.int64) * outputs + output[None, :]
    mask = (row[:, None] < tokens) & (output[None, :] < outputs)
    tl.store(out + offset, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def narrow_linear(
    x,
    first,
    second,
    out,
    other,
    tokens,
    stride,
    size,
    outputs,
    others,
    WIDTH: tl.constexpr,
    PAIR: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out = x first' and, where PAIR, other = x second': x [tokens, size], weights [outputs, size]
    and [others, size].

    Grid: blocks of ROWS tokens.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output, depth = tl.arange(0, WIDTH), tl.arange(0, DEPTH)
    x_tile = x + row[:, None].to(tl.int64) * stride + depth[None, :]
    acc, acc_other = (
        tl.zeros([ROWS, WIDTH], dtype=tl.float32),
        tl.zeros([ROWS, WIDTH], dtype=tl.float32),
    )
    for start in range(0, size, DEPTH):
        mask = row[:, None] < tokens
        if not EVEN:
            mask = mask & (start + depth[None, :] < size)
        tile = tl.load(x_tile + start, mask=mask, other=0.0)
        acc = tl.dot(
            tile, tl.trans(_load_weight(first, output, start + depth, outputs, size, EVEN)), acc
        )
        if PAIR:
            acc_other = tl.dot(
                tile,
                tl.trans(_load_weight(second, output, start + depth, others, size, EVEN)),
                acc_other,
            )
    _store(out, acc, row, tokens, output, outputs)
    if PAIR:
        _store(other, acc_other, row, tokens, output, others)


@triton.jit(do_not_specialize=["count"])
def sum_partials(x, out, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out [C] = the sum of x [P, C] over P.  Grid: blocks of COLUMNS."""
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        acc += tl.load(
            x + row.to(tl.int64) * width + column, mask=(row < count) & (column < width), other=0.0
        )
    tl.store(out + column, tl.sum(acc, 0)[None, :].to(out.dtype.element_ty), mask=column < width)
