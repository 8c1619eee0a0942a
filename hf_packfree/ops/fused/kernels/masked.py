"""Triton kernels of products with a tensor x [T, D] some of whose elements are dropped out: each
draws the mask itself, and none stores what is left of x.

A mask is drawn in blocks of 4 ROWS tokens, by Philox with 7 rounds (Salmon et al., SC 2011): its
key is the seed plus number, its counter one of ROWS tokens and the column, and each of its four
numbers decides for the token that is so many times ROWS tokens further.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = tl.constexpr(16)


@triton.jit
def _draw(key, block, column, width):
    """Four numbers from 0, below 1, for each token [ROWS, 1] and column [1, columns]."""
    token = block * ROWS + tl.arange(0, ROWS)[:, None]
    return tl.rand4x(key, token * width + column, n_rounds=7)


@triton.jit
def _dropped(x, token, column, tokens, width, stride, random, probability):
    """A part of x, with zero times x where it is dropped out."""
    inside = (token < tokens) & (column < width)
    value = tl.load(x + token.to(tl.int64) * stride + column, mask=inside, other=0.0)
    return tl.where(random >= probability, value, value * 0)


@triton.jit
def _left(x, key, block, column, tokens, width, stride, probability):
    """What is left of a block's tokens, in four parts of ROWS."""
    token = block * 4 * ROWS + tl.arange(0, ROWS)[:, None]
    r0, r1, r2, r3 = _draw(key, block, column, width)
    x0 = _dropped(x, token, column, tokens, width, stride, r0, probability)
    x1 = _dropped(x, token + ROWS, column, tokens, width, stride, r1, probability)
    x2 = _dropped(x, token + 2 * ROWS, column, tokens, width, stride, r2, probability)
    x3 = _dropped(x, token + 3 * ROWS, column, tokens, width, stride, r3, probability)
    return x0, x1, x2, x3


@triton.jit
def _part_of_h(h, token, k, tokens, K, stride):
    inside = (token < tokens) & (k < K)
    return tl.load(h + token.to(tl.int64) * stride + k, mask=inside, other=0.0)


@triton.jit
def _store_sums(sums, token, k, tokens, K, value):
    tl.store(sums + token.to(tl.int64) * K + k, value, mask=(token < tokens) & (k < K))


@triton.jit(do_not_specialize=["number", "tokens"])
def times_dropped(
    x,
    w,
    sums,
    seed,
    number,
    tokens,
    width,
    K,
    stride,
    scale,
    probability,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    WIDTH_K: tl.constexpr,
):
    """sums [parts, T, K] = scale times dropped x w', of each part of the columns, in fp32; w
    [K, D]. Grid: blocks of 4 ROWS tokens, parts of STEPS blocks of COLUMNS.
    """
    block, part = tl.program_id(0), tl.program_id(1)
    key = tl.load(seed) + number
    token = block * 4 * ROWS + tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, WIDTH_K)
    acc0 = tl.zeros([ROWS, WIDTH_K], dtype=tl.float32)
    acc1 = tl.zeros([ROWS, WIDTH_K], dtype=tl.float32)
    acc2 = tl.zeros([ROWS, WIDTH_K], dtype=tl.float32)
    acc3 = tl.zeros([ROWS, WIDTH_K], dtype=tl.float32)
    for step in range(STEPS):
        first = (part * STEPS + step) * COLUMNS
        column = first + tl.arange(0, COLUMNS)[None, :]
        at = first + tl.arange(0, COLUMNS)[:, None]
        inside = (at < width) & (k[None, :] < K)
        factor = tl.load(w + k[None, :].to(tl.int64) * width + at, mask=inside, other=0.0)
        x0, x1, x2, x3 = _left(x, key, block, column, tokens, width, stride, probability)
        acc0 = tl.dot(x0, factor, acc0)
        acc1 = tl.dot(x1, factor, acc1)
        acc2 = tl.dot(x2, factor, acc2)
        acc3 = tl.dot(x3, factor, acc3)
    mine = sums + part.to(tl.int64) * tokens * K
    _store_sums(mine, token, k[None, :], tokens, K, acc0 * scale)
    _store_sums(mine, token + ROWS, k[None, :], tokens, K, acc1 * scale)
    _store_sums(mine, token + 2 * ROWS, k[None, :], tokens, K, acc2 * scale)
    _store_sums(mine, token + 3 * ROWS, k[None, :], tokens, K, acc3 * scale)


@triton.jit(do_not_specialize=["number", "tokens", "steps"])
def gradient_of_factor(
    x,
    d_h,
    sums,
    seed,
    number,
    tokens,
    width,
    K,
    stride,
    h_stride,
    steps,
    probability,
    COLUMNS: tl.constexpr,
    WIDTH_K: tl.constexpr,
):
    """sums [programs, K, D] = d_h' dropped x, of each program's tokens, in fp32; d_h [T, K]. Grid:
    blocks of COLUMNS, programs of `steps` blocks of 4 ROWS tokens.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    key = tl.load(seed) + number
    k = tl.arange(0, WIDTH_K)
    acc = tl.zeros([WIDTH_K, COLUMNS], dtype=tl.float32)
    for step in range(steps):
        block = tl.program_id(1) * steps + step
        token = block * 4 * ROWS + tl.arange(0, ROWS)[:, None]
        x0, x1, x2, x3 = _left(x, key, block, column, tokens, width, stride, probability)
        h0 = _part_of_h(d_h, token, k[None, :], tokens, K, h_stride)
        h1 = _part_of_h(d_h, token + ROWS, k[None, :], tokens, K, h_stride)
        h2 = _part_of_h(d_h, token + 2 * ROWS, k[None, :], tokens, K, h_stride)
        h3 = _part_of_h(d_h, token + 3 * ROWS, k[None, :], tokens, K, h_stride)
        acc = tl.dot(tl.trans(h0), x0, acc)
        acc = tl.dot(tl.trans(h1), x1, acc)
        acc = tl.dot(tl.trans(h2), x2, acc)
        acc = tl.dot(tl.trans(h3), x3, acc)
    place = sums + (tl.program_id(1).to(tl.int64) * K + k[:, None]) * width + column
    tl.store(place, acc, mask=(k[:, None] < K) & (column < width))


@triton.jit
def _add(out, token, column, tokens, width, value, random, probability, ADDED: tl.constexpr):
    inside = (token < tokens) & (column < width)
    place = out + token.to(tl.int64) * width + column
    value = tl.where(random >= probability, value, value * 0)
    if ADDED:
        value += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["number", "tokens"])
def add_dropped(
    d_h,
    w,
    out,
    seed,
    number,
    tokens,
    width,
    K,
    h_stride,
    probability,
    COLUMNS: tl.constexpr,
    WIDTH_K: tl.constexpr,
    ADDED: tl.constexpr,
):
    """out [T, D] = d_h w, dropped out, plus `out` where ADDED; d_h [T, K], w [K, D]. Grid: blocks
    of 4 ROWS tokens, blocks of COLUMNS.
    """
    block = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    token = block * 4 * ROWS + tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, WIDTH_K)
    key = tl.load(seed) + number
    r0, r1, r2, r3 = _draw(key, block, column, width)
    inside = (k[:, None] < K) & (column < width)
    factor = tl.load(w + k[:, None].to(tl.int64) * width + column, mask=inside, other=0.0)
    v0 = tl.dot(_part_of_h(d_h, token, k[None, :], tokens, K, h_stride), factor)
    v1 = tl.dot(_part_of_h(d_h, token + ROWS, k[None, :], tokens, K, h_stride), factor)
    v2 = tl.dot(_part_of_h(d_h, token + 2 * ROWS, k[None, :], tokens, K, h_stride), factor)
    v3 = tl.dot(_part_of_h(d_h, token + 3 * ROWS, k[None, :], tokens, K, h_stride), factor)
    _add(out, token, column, tokens, width, v0, r0, probability, ADDED)
    _add(out, token + ROWS, column, tokens, width, v1, r1, probability, ADDED)
    _add(out, token + 2 * ROWS, column, tokens, width, v2, r2, probability, ADDED)
    _add(out, token + 3 * ROWS, column, tokens, width, v3, r3, probability, ADDED)
