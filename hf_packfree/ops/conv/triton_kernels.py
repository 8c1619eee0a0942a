"""Triton kernels of the causal convolution: a strip of tokens is walked four at a time, its taps kept in registers.

Every token and every gradient is read once (a few more per strip), and the next four are asked for before these four are
worked on, which is what keeps the memory busy.  What a tap would read from the document before is masked by `ages`, the
tokens' places in their documents.  Where all four are of one document and at least three tokens old, nothing has to be masked:
nearly everywhere, and `groups` says so with one number, since the kernels are bound by instructions.  Written out for four
taps; shorter filters read zeros.

q, k and v lie side by side in the row, and each has a tensor of its own beyond the convolution: H key heads twice, then
HV value heads, all of D channels.  A program works on some heads of one of them.  `rows` says at which row of those tensors
each token lies; `groups` where the first of four lies that need no mask, whose rows follow each other, or else -1.

Shapes: T tokens, C = (2 H + HV) D channels, S strips.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_packfree.ops.conv.triton_activation import activate4, deactivate4
from hf_packfree.ops.conv.triton_parts import (
    ages4, convolve4, group_of, kept, load4, load_group, load_taps, part_of, store4, store_group, store_tap, widen4,
)


@triton.jit(do_not_specialize=["tokens"])
def convolve(
    x, weight, bias, ages, rows, groups, q, k, v, tokens, stride, keys, values, size, eps,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr,
    STRIP: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """q, k [T, H, D] and v [T, HV, D] = act(conv(x)), heads of q and k divided by their L2 norms if UNIT.

    Grid: (strips, blocks of q's heads, of k's, of v's).
    """
    first = tl.program_id(0) * STRIP
    out, unit, width, place, channel, ok = part_of(q, k, v, keys, values, size, BLOCK_H, BLOCK_D)
    w0, w1, w2, w3, shift = load_taps(weight, bias, channel, ok, TAPS, BIAS)
    n0, n1, n2, n3 = load4(x, stride, channel, ok, first - 1, tokens)
    x0, x1, x2, x3 = widen4(n0, n1, n2, n3)
    n0, n1, n2, n3 = load4(x, stride, channel, ok, first + 3, tokens)
    group = group_of(groups, first + 3, tokens)
    for step in range(STRIP // 4):
        t = first + step * 4 + 3
        x4, x5, x6 = x0, x1, x2
        x0, x1, x2, x3 = widen4(n0, n1, n2, n3)
        n0, n1, n2, n3 = load4(x, stride, channel, ok, t + 4, tokens)
        if group >= 0:
            u0, u1, u2, u3 = convolve4(x0, x1, x2, x3, x4, x5, x6, 3, 3, 3, 3, w0, w1, w2, w3, False)
        else:
            a0, a1, a2, a3 = ages4(ages, t, tokens)
            u0, u1, u2, u3 = convolve4(x0, x1, x2, x3, x4, x5, x6, a0, a1, a2, a3, w0, w1, w2, w3, True)
        u0, u1, u2, u3 = activate4(u0, u1, u2, u3, shift, eps, unit, BIAS, SILU, UNIT)
        store_group(out, width, place, ok, group, rows, t, tokens, u0, u1, u2, u3)
        group = group_of(groups, t + 4, tokens)


@triton.jit
def _spread(g0, g1, g2, g3, a0, a1, a2, a3, w1, w2, w3, CUT: tl.constexpr):
    """What the gradients of four tokens, the latest first, give to the tokens before theirs.

    Returns what the second, third and fourth of the four get, then what the three tokens before the four get.
    """
    return (
        kept(g0, a0, 1, CUT) * w1,
        kept(g1, a1, 1, CUT) * w1 + kept(g0, a0, 2, CUT) * w2,
        kept(g2, a2, 1, CUT) * w1 + kept(g1, a1, 2, CUT) * w2 + kept(g0, a0, 3, CUT) * w3,
        kept(g3, a3, 1, CUT) * w1 + kept(g2, a2, 2, CUT) * w2 + kept(g1, a1, 3, CUT) * w3,
        kept(g3, a3, 2, CUT) * w2 + kept(g2, a2, 3, CUT) * w3,
        kept(g3, a3, 3, CUT) * w3,
    )


@triton.jit
def _met(g0, g1, g2, g3, x0, x1, x2, x3, a0, a1, a2, a3, back: tl.constexpr, CUT: tl.constexpr):
    """What one tap's gradient gets from four tokens' gradients and the tokens that the tap met there."""
    met = g0 * kept(x0, a0, back, CUT) + g1 * kept(x1, a1, back, CUT)
    return met + g2 * kept(x2, a2, back, CUT) + g3 * kept(x3, a3, back, CUT)


@triton.jit
def _taps(g0, g1, g2, g3, x0, x1, x2, x3, x4, x5, x6, a0, a1, a2, a3, CUT: tl.constexpr):
    """What the four taps' gradients get, newest first."""
    return (
        _met(g0, g1, g2, g3, x0, x1, x2, x3, a0, a1, a2, a3, 0, False),
        _met(g0, g1, g2, g3, x1, x2, x3, x4, a0, a1, a2, a3, 1, CUT),
        _met(g0, g1, g2, g3, x2, x3, x4, x5, a0, a1, a2, a3, 2, CUT),
        _met(g0, g1, g2, g3, x3, x4, x5, x6, a0, a1, a2, a3, 3, CUT),
    )


@triton.jit(do_not_specialize=["tokens"])
def convolve_backward(
    x, weight, bias, ages, rows, groups, d_q, d_k, d_v, d_x, d_weight, d_bias,
    tokens, stride, d_stride, keys, values, size, eps,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr,
    STRIP: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """d_x [T, C] from d_q, d_k and d_v, and per strip d_weight [S, C, TAPS] and, if BIAS, d_bias [S, C], in fp32.

    Walks from the strip's end, beginning with the four tokens past it, whose gradients reach back into the strip.
    """
    first = tl.program_id(0) * STRIP
    d_out, unit, width, place, channel, ok = part_of(d_q, d_k, d_v, keys, values, size, BLOCK_H, BLOCK_D)
    w0, w1, w2, w3, shift = load_taps(weight, bias, channel, ok, TAPS, BIAS)
    last = first + STRIP + 3
    n0, n1, n2, n3 = load4(x, stride, channel, ok, last, tokens)
    x4, x5, x6, x0 = widen4(n0, n1, n2, n3)
    n0, n1, n2, n3 = load4(x, stride, channel, ok, last - 3, tokens)
    group, ahead = group_of(groups, last, tokens), group_of(groups, last - 4, tokens)
    m0, m1, m2, m3 = load_group(d_out, width, place, ok, group, rows, last, tokens)
    zero = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
    s0, s1, s2, s3, total = zero, zero, zero, zero, zero
    p1, p2, p3 = zero, zero, zero  # what the tokens after these four give to the latest three of them
    for step in range(STRIP // 4 + 1):
        t = last - step * 4
        x0, x1, x2 = x4, x5, x6
        x3, x4, x5, x6 = widen4(n0, n1, n2, n3)
        g0, g1, g2, g3 = widen4(m0, m1, m2, m3)
        n0, n1, n2, n3 = load4(x, stride, channel, ok, t - 7, tokens)
        m0, m1, m2, m3 = load_group(d_out, width, place, ok, ahead, rows, t - 4, tokens)
        inside, a0, a1, a2, a3 = group >= 0, 3, 3, 3, 3
        group, ahead = ahead, group_of(groups, t - 8, tokens)
        if inside:
            u0, u1, u2, u3 = convolve4(x0, x1, x2, x3, x4, x5, x6, a0, a1, a2, a3, w0, w1, w2, w3, False)
        else:
            a0, a1, a2, a3 = ages4(ages, t, tokens)
            u0, u1, u2, u3 = convolve4(x0, x1, x2, x3, x4, x5, x6, a0, a1, a2, a3, w0, w1, w2, w3, True)
        g0, g1, g2, g3 = deactivate4(u0, u1, u2, u3, g0, g1, g2, g3, shift, eps, unit, BIAS, SILU, UNIT)
        if inside:
            d1, d2, d3, b1, b2, b3 = _spread(g0, g1, g2, g3, a0, a1, a2, a3, w1, w2, w3, False)
            e0, e1, e2, e3 = _taps(g0, g1, g2, g3, x0, x1, x2, x3, x4, x5, x6, a0, a1, a2, a3, False)
        else:
            d1, d2, d3, b1, b2, b3 = _spread(g0, g1, g2, g3, a0, a1, a2, a3, w1, w2, w3, True)
            e0, e1, e2, e3 = _taps(g0, g1, g2, g3, x0, x1, x2, x3, x4, x5, x6, a0, a1, a2, a3, True)
        if step > 0:
            h0, h1, h2, h3 = g0 * w0 + p1, g1 * w0 + d1 + p2, g2 * w0 + d2 + p3, g3 * w0 + d3
            store4(d_x, d_stride, channel, ok, t, tokens, h0, h1, h2, h3)
            s0, s1, s2, s3 = s0 + e0, s1 + e1, s2 + e2, s3 + e3
            if BIAS:
                total += g0 + g1 + g2 + g3
        p1, p2, p3 = b1, b2, b3
    strip = tl.program_id(0).to(tl.int64) * (2 * keys + values) * size
    d_weight += strip * TAPS
    store_tap(d_weight, channel, ok, 0, TAPS, s0)
    store_tap(d_weight, channel, ok, 1, TAPS, s1)
    store_tap(d_weight, channel, ok, 2, TAPS, s2)
    store_tap(d_weight, channel, ok, 3, TAPS, s3)
    if BIAS:
        tl.store(d_bias + strip + channel, total, mask=ok)
