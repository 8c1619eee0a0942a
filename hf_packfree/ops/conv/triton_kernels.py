"""Triton kernels of the causal convolution: a strip of tokens is walked four at a time, its taps kept in registers.

Every token and every gradient is read once (a few more per strip), and the next four are asked for before these four are
worked on, which is what keeps the memory busy.  What a tap would read from the document before is masked by `age`, the token's
place in its document; where all four are at least three tokens old nothing has to be masked, which is nearly everywhere,
and the kernels are bound by instructions.  Written out for four taps; shorter filters read zeros.

q, k and v lie side by side in the row, and each has a tensor of its own beyond the convolution: H key heads twice, then
HV value heads, all of D channels.  A program works on some heads of one of them.

Shapes: T tokens, C = (2 H + HV) D channels, S strips.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_packfree.ops.conv.triton_parts import (
    activate, ages4, convolve4, deactivate, kept, load4, load_taps, part_of, store, store_tap, widen4,
)  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def convolve(
    x, weight, bias, ages, q, k, v, tokens, stride, keys, values, size, eps,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr,
    STRIP: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """q, k [T, H, D] and v [T, HV, D] = act(conv(x)), heads of q and k divided by their L2 norms if UNIT.

    Grid: (strips, blocks of q's heads, of k's, of v's).
    """
    first = tl.program_id(0) * STRIP
    out, unit, row, place, channel, ok = part_of(q, k, v, keys, values, size, BLOCK_H, BLOCK_D)
    w0, w1, w2, w3, shift = load_taps(weight, bias, channel, ok, TAPS, BIAS)
    n0, n1, n2, n3 = load4(x, stride, channel, ok, first - 1, tokens)
    x0, x1, x2, x3 = widen4(n0, n1, n2, n3)
    n0, n1, n2, n3 = load4(x, stride, channel, ok, first + 3, tokens)
    for step in range(STRIP // 4):
        t = first + step * 4 + 3
        x4, x5, x6 = x0, x1, x2
        x0, x1, x2, x3 = widen4(n0, n1, n2, n3)
        n0, n1, n2, n3 = load4(x, stride, channel, ok, t + 4, tokens)
        a0, a1, a2, a3 = ages4(ages, t, tokens)
        if tl.minimum(tl.minimum(a0, a1), tl.minimum(a2, a3)) >= 3:
            u0, u1, u2, u3 = convolve4(x0, x1, x2, x3, x4, x5, x6, a0, a1, a2, a3, w0, w1, w2, w3, False)
        else:
            u0, u1, u2, u3 = convolve4(x0, x1, x2, x3, x4, x5, x6, a0, a1, a2, a3, w0, w1, w2, w3, True)
        store(out, row, place, ok, t - 3, tokens, activate(u3, shift, eps, unit, BIAS, SILU, UNIT))
        store(out, row, place, ok, t - 2, tokens, activate(u2, shift, eps, unit, BIAS, SILU, UNIT))
        store(out, row, place, ok, t - 1, tokens, activate(u1, shift, eps, unit, BIAS, SILU, UNIT))
        store(out, row, place, ok, t, tokens, activate(u0, shift, eps, unit, BIAS, SILU, UNIT))


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
    x, weight, bias, ages, d_q, d_k, d_v, d_x, d_weight, d_bias, tokens, stride, d_stride, keys, values, size, eps,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr,
    STRIP: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """d_x [T, C] from d_q, d_k and d_v, and per strip d_weight [S, C, TAPS] and, if BIAS, d_bias [S, C], in fp32.

    Walks from the strip's end, beginning with the four tokens past it, whose gradients reach back into the strip.
    """
    first = tl.program_id(0) * STRIP
    d_out, unit, row, place, channel, ok = part_of(d_q, d_k, d_v, keys, values, size, BLOCK_H, BLOCK_D)
    w0, w1, w2, w3, shift = load_taps(weight, bias, channel, ok, TAPS, BIAS)
    last = first + STRIP + 3
    n0, n1, n2, n3 = load4(x, stride, channel, ok, last, tokens)
    x4, x5, x6, x0 = widen4(n0, n1, n2, n3)
    n0, n1, n2, n3 = load4(x, stride, channel, ok, last - 3, tokens)
    m0, m1, m2, m3 = load4(d_out, row, place, ok, last, tokens)
    zero = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
    s0, s1, s2, s3, total = zero, zero, zero, zero, zero
    p1, p2, p3 = zero, zero, zero  # what the tokens after these four give to the latest three of them
    for step in range(STRIP // 4 + 1):
        t = last - step * 4
        x0, x1, x2 = x4, x5, x6
        x3, x4, x5, x6 = widen4(n0, n1, n2, n3)
        g0, g1, g2, g3 = widen4(m0, m1, m2, m3)
        n0, n1, n2, n3 = load4(x, stride, channel, ok, t - 7, tokens)
        m0, m1, m2, m3 = load4(d_out, row, place, ok, t - 4, tokens)
        a0, a1, a2, a3 = ages4(ages, t, tokens)
        inside = tl.minimum(tl.minimum(a0, a1), tl.minimum(a2, a3)) >= 3
        if inside:
            u0, u1, u2, u3 = convolve4(x0, x1, x2, x3, x4, x5, x6, a0, a1, a2, a3, w0, w1, w2, w3, False)
        else:
            u0, u1, u2, u3 = convolve4(x0, x1, x2, x3, x4, x5, x6, a0, a1, a2, a3, w0, w1, w2, w3, True)
        g0 = deactivate(u0, g0, shift, eps, unit, BIAS, SILU, UNIT)
        g1 = deactivate(u1, g1, shift, eps, unit, BIAS, SILU, UNIT)
        g2 = deactivate(u2, g2, shift, eps, unit, BIAS, SILU, UNIT)
        g3 = deactivate(u3, g3, shift, eps, unit, BIAS, SILU, UNIT)
        if inside:
            d1, d2, d3, b1, b2, b3 = _spread(g0, g1, g2, g3, a0, a1, a2, a3, w1, w2, w3, False)
            e0, e1, e2, e3 = _taps(g0, g1, g2, g3, x0, x1, x2, x3, x4, x5, x6, a0, a1, a2, a3, False)
        else:
            d1, d2, d3, b1, b2, b3 = _spread(g0, g1, g2, g3, a0, a1, a2, a3, w1, w2, w3, True)
            e0, e1, e2, e3 = _taps(g0, g1, g2, g3, x0, x1, x2, x3, x4, x5, x6, a0, a1, a2, a3, True)
        if step > 0:
            store(d_x, d_stride, channel, ok, t, tokens, g0 * w0 + p1)
            store(d_x, d_stride, channel, ok, t - 1, tokens, g1 * w0 + d1 + p2)
            store(d_x, d_stride, channel, ok, t - 2, tokens, g2 * w0 + d2 + p3)
            store(d_x, d_stride, channel, ok, t - 3, tokens, g3 * w0 + d3)
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
