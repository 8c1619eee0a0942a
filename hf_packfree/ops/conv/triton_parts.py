"""What the convolution's two Triton kernels are made of: loads and stores that stay inside, masks at documents' edges.

Shapes: T tokens, C channels, H heads of D channels that one program works on.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def part_of(q, k, v, keys, values, size, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """This program's tensor, if that is q or k, its channels a token, and where the program's lie in it and in the row.

    Returns tensor, unit, channels of a token, places in the tensor, channels in the row, and which of them are there.
    """
    block, blocks = tl.program_id(1), tl.cdiv(keys, BLOCK_H)
    if block < blocks:
        mine, before, heads, first = q, 0, keys, block * BLOCK_H
    elif block < 2 * blocks:
        mine, before, heads, first = k, keys, keys, (block - blocks) * BLOCK_H
    else:
        mine, before, heads, first = v, 2 * keys, values, (block - 2 * blocks) * BLOCK_H
    h, d = first + tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    ok = (h < heads) & (d < size)
    return mine, block < 2 * blocks, heads * size, h * size + d, (before + h) * size + d, ok


@triton.jit
def load_tap(weight, channel, ok, back: tl.constexpr, TAPS: tl.constexpr):
    """Weights [C, TAPS]: the tap that meets the token `back` places before."""
    return tl.load(weight + channel * TAPS + (TAPS - 1 - back), mask=ok & (back < TAPS), other=0.0).to(tl.float32)


@triton.jit
def load_taps(weight, bias, channel, ok, TAPS: tl.constexpr, BIAS: tl.constexpr):
    """The four taps, newest first, zero beyond TAPS, and the bias."""
    shift = tl.load(bias + channel, mask=ok, other=0.0).to(tl.float32) if BIAS else 0.0
    return (
        load_tap(weight, channel, ok, 0, TAPS), load_tap(weight, channel, ok, 1, TAPS),
        load_tap(weight, channel, ok, 2, TAPS), load_tap(weight, channel, ok, 3, TAPS), shift,
    )


@triton.jit
def store_tap(d_weight, channel, ok, back: tl.constexpr, TAPS: tl.constexpr, value):
    tl.store(d_weight + channel * TAPS + (TAPS - 1 - back), value, mask=ok & (back < TAPS))


@triton.jit
def _mask(ok):
    """Return `ok` as it is: Triton's interpreter keeps a block and a scalar condition as int32, and a mask has to be bool."""
    return ok != 0


@triton.jit
def _there(ok, t, tokens):
    return _mask(ok & (t >= 0) & (t < tokens))


@triton.jit
def load4(x, stride, place, ok, t, tokens):
    """The channels of token t and the three before it, the latest first; zero outside the row."""
    start = x + (t - 3).to(tl.int64) * stride  # one multiplication for four rows that follow each other
    return (
        tl.load(start + 3 * stride + place, mask=_there(ok, t, tokens), other=0.0),
        tl.load(start + 2 * stride + place, mask=_there(ok, t - 1, tokens), other=0.0),
        tl.load(start + stride + place, mask=_there(ok, t - 2, tokens), other=0.0),
        tl.load(start + place, mask=_there(ok, t - 3, tokens), other=0.0),
    )


@triton.jit
def store4(out, stride, place, ok, t, tokens, y0, y1, y2, y3):
    """The counterpart of `load4`; y0 is token t's."""
    start = out + (t - 3).to(tl.int64) * stride
    dtype = out.dtype.element_ty
    tl.store(start + 3 * stride + place, y0.to(dtype), mask=_mask(ok & (t < tokens)))
    tl.store(start + 2 * stride + place, y1.to(dtype), mask=_mask(ok & (t - 1 < tokens)))
    tl.store(start + stride + place, y2.to(dtype), mask=_mask(ok & (t - 2 < tokens)))
    tl.store(start + place, y3.to(dtype), mask=_mask(ok & (t - 3 < tokens)))


@triton.jit
def group_of(groups, t, tokens):
    """Where the first of the four tokens lies of which t is the last, or -1: each has to be asked about."""
    return tl.load(groups + t // 4, mask=(t >= 3) & (t < tokens), other=-1)


@triton.jit
def _row_of(rows, t, tokens):
    return tl.load(rows + t, mask=(t >= 0) & (t < tokens), other=-1)


@triton.jit
def _load_row(x, stride, place, ok, row):
    return tl.load(x + row.to(tl.int64) * stride + place, mask=_mask(ok & (row >= 0)), other=0.0)


@triton.jit
def load_group(x, stride, place, ok, group, rows, t, tokens):
    """`load4` of a tensor whose tokens lie where `rows` says, one after another where `group` is known."""
    if group >= 0:
        start = x + group.to(tl.int64) * stride
        x0 = tl.load(start + 3 * stride + place, mask=ok, other=0.0)
        x1 = tl.load(start + 2 * stride + place, mask=ok, other=0.0)
        x2 = tl.load(start + stride + place, mask=ok, other=0.0)
        x3 = tl.load(start + place, mask=ok, other=0.0)
    else:
        x0 = _load_row(x, stride, place, ok, _row_of(rows, t, tokens))
        x1 = _load_row(x, stride, place, ok, _row_of(rows, t - 1, tokens))
        x2 = _load_row(x, stride, place, ok, _row_of(rows, t - 2, tokens))
        x3 = _load_row(x, stride, place, ok, _row_of(rows, t - 3, tokens))
    return x0, x1, x2, x3


@triton.jit
def _store_row(out, stride, place, ok, row, value):
    tl.store(out + row.to(tl.int64) * stride + place, value, mask=_mask(ok & (row >= 0)))


@triton.jit
def store_group(out, stride, place, ok, group, rows, t, tokens, y0, y1, y2, y3):
    """The counterpart of `load_group`; y0 is token t's."""
    dtype = out.dtype.element_ty
    y0, y1, y2, y3 = y0.to(dtype), y1.to(dtype), y2.to(dtype), y3.to(dtype)
    if group >= 0:
        start = out + group.to(tl.int64) * stride
        tl.store(start + place, y3, mask=ok)
        tl.store(start + stride + place, y2, mask=ok)
        tl.store(start + 2 * stride + place, y1, mask=ok)
        tl.store(start + 3 * stride + place, y0, mask=ok)
    else:
        _store_row(out, stride, place, ok, _row_of(rows, t, tokens), y0)
        _store_row(out, stride, place, ok, _row_of(rows, t - 1, tokens), y1)
        _store_row(out, stride, place, ok, _row_of(rows, t - 2, tokens), y2)
        _store_row(out, stride, place, ok, _row_of(rows, t - 3, tokens), y3)


@triton.jit
def widen4(x0, x1, x2, x3):
    return x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)


@triton.jit
def age_of(ages, t, tokens):
    """Tokens past the row count as old: they are zero anyway."""
    return tl.load(ages + t, mask=t < tokens, other=3)


@triton.jit
def ages4(ages, t, tokens):
    """Those of token t and the three before it, the latest first."""
    return age_of(ages, t, tokens), age_of(ages, t - 1, tokens), age_of(ages, t - 2, tokens), age_of(ages, t - 3, tokens)


@triton.jit
def kept(x, age, back: tl.constexpr, CUT: tl.constexpr):
    """x if the token `back` places before one of that age is of the same document, else zero."""
    if CUT:
        x = tl.where(age >= back, x, 0.0)
    return x


@triton.jit
def convolve1(x0, x1, x2, x3, age, w0, w1, w2, w3, CUT: tl.constexpr):
    """The convolution at a token x0, with those before it."""
    return x0 * w0 + kept(x1, age, 1, CUT) * w1 + kept(x2, age, 2, CUT) * w2 + kept(x3, age, 3, CUT) * w3


@triton.jit
def convolve4(x0, x1, x2, x3, x4, x5, x6, a0, a1, a2, a3, w0, w1, w2, w3, CUT: tl.constexpr):
    """The convolution at four tokens, the latest first."""
    return (
        convolve1(x0, x1, x2, x3, a0, w0, w1, w2, w3, CUT), convolve1(x1, x2, x3, x4, a1, w0, w1, w2, w3, CUT),
        convolve1(x2, x3, x4, x5, a2, w0, w1, w2, w3, CUT), convolve1(x3, x4, x5, x6, a3, w0, w1, w2, w3, CUT),
    )
