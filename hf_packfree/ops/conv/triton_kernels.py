"""Triton kernels of the causal convolution: a strip of tokens is walked four at a time, its taps
kept in registers.

Every token and every gradient is read once (a few more per strip), and the next four are loaded
before these four are worked on, which keeps the memory busy. What a tap would read from the
document before is masked by `pos_in_seq`, the tokens' positions in their documents. Nearly
everywhere nothing has to be masked: `interior` holds one number for four tokens that says so, since
the kernels are bound by instructions. The code is unrolled for four taps; shorter filters read
zeros.

x holds q, k and v side by side: H key heads twice, then HV value heads, all of D channels. The
output has a tensor for each of the three, and a program works on some heads of one.

Shapes: T tokens, C = (2 H + HV) D channels, S strips.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_packfree.ops.conv.triton_activation import activate4, activate4_backward
from hf_packfree.ops.conv.triton_parts import (
    conv4,
    conv_dw,
    conv_dx,
    heads_of_program,
    is_interior,
    load4,
    load4_if,
    load_pos4,
    load_taps,
    store4,
    store4_if,
    store_tap,
    widen4,
)


@triton.jit(do_not_specialize=["tokens"])
def conv(
    x,
    weight,
    bias,
    pos_in_seq,
    interior,
    q,
    k,
    v,
    tokens,
    stride,
    keys,
    values,
    size,
    eps,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    QK_L2NORM: tl.constexpr,
    STRIP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """q, k [T, H, D] and v [T, HV, D] = act(conv(x)), heads of q and k divided by their L2 norms if
    QK_L2NORM.

    Grid: (strips, blocks of q's heads, of k's, of v's).
    """
    first = tl.program_id(0) * STRIP
    out, is_qk, width, offset, channel, mask = heads_of_program(
        q, k, v, keys, values, size, BLOCK_H, BLOCK_D
    )
    w0, w1, w2, w3, b = load_taps(weight, bias, channel, mask, TAPS, BIAS)
    n0, n1, n2, n3 = load4(x, stride, channel, mask, first - 1, tokens)
    x0, x1, x2, x3 = widen4(n0, n1, n2, n3)
    n0, n1, n2, n3 = load4(x, stride, channel, mask, first + 3, tokens)
    inside = is_interior(interior, first + 3, tokens)
    for step in range(STRIP // 4):
        t = first + step * 4 + 3
        x4, x5, x6 = x0, x1, x2
        x0, x1, x2, x3 = widen4(n0, n1, n2, n3)
        n0, n1, n2, n3 = load4(x, stride, channel, mask, t + 4, tokens)
        if inside:
            u0, u1, u2, u3 = conv4(x0, x1, x2, x3, x4, x5, x6, 3, 3, 3, 3, w0, w1, w2, w3, False)
        else:
            p0, p1, p2, p3 = load_pos4(pos_in_seq, t, tokens)
            u0, u1, u2, u3 = conv4(x0, x1, x2, x3, x4, x5, x6, p0, p1, p2, p3, w0, w1, w2, w3, True)
        u0, u1, u2, u3 = activate4(u0, u1, u2, u3, b, eps, is_qk, BIAS, SILU, QK_L2NORM)
        store4_if(inside, out, width, offset, mask, t, tokens, u0, u1, u2, u3)
        inside = is_interior(interior, t + 4, tokens)


@triton.jit(do_not_specialize=["tokens"])
def conv_backward(
    x,
    weight,
    bias,
    pos_in_seq,
    interior,
    d_q,
    d_k,
    d_v,
    d_x,
    d_weight,
    d_bias,
    tokens,
    stride,
    d_stride,
    keys,
    values,
    size,
    eps,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    QK_L2NORM: tl.constexpr,
    STRIP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """d_x [T, C] from d_q, d_k and d_v, and per strip d_weight [S, C, TAPS] and d_bias [S, C]
    unless None, in fp32.

    Walks from the strip's end, beginning with the four tokens past it, whose gradients reach back
    into the strip.
    """
    first = tl.program_id(0) * STRIP
    d_out, is_qk, width, offset, channel, mask = heads_of_program(
        d_q, d_k, d_v, keys, values, size, BLOCK_H, BLOCK_D
    )
    w0, w1, w2, w3, b = load_taps(weight, bias, channel, mask, TAPS, BIAS)
    last = first + STRIP + 3
    n0, n1, n2, n3 = load4(x, stride, channel, mask, last, tokens)
    x4, x5, x6, x0 = widen4(n0, n1, n2, n3)
    n0, n1, n2, n3 = load4(x, stride, channel, mask, last - 3, tokens)
    inside, next_inside = (
        is_interior(interior, last, tokens),
        is_interior(interior, last - 4, tokens),
    )
    m0, m1, m2, m3 = load4_if(inside, d_out, width, offset, mask, last, tokens)
    zero = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
    dw0, dw1, dw2, dw3, db = zero, zero, zero, zero, zero
    # carried from step to step: the gradients that later tokens give to the last three of these
    # four
    c1, c2, c3 = zero, zero, zero
    for step in range(STRIP // 4 + 1):
        t = last - step * 4
        x0, x1, x2 = x4, x5, x6
        x3, x4, x5, x6 = widen4(n0, n1, n2, n3)
        g0, g1, g2, g3 = widen4(m0, m1, m2, m3)
        n0, n1, n2, n3 = load4(x, stride, channel, mask, t - 7, tokens)
        m0, m1, m2, m3 = load4_if(next_inside, d_out, width, offset, mask, t - 4, tokens)
        unmasked, p0, p1, p2, p3 = inside, 3, 3, 3, 3
        inside, next_inside = next_inside, is_interior(interior, t - 8, tokens)
        if unmasked:
            u0, u1, u2, u3 = conv4(
                x0, x1, x2, x3, x4, x5, x6, p0, p1, p2, p3, w0, w1, w2, w3, False
            )
        else:
            p0, p1, p2, p3 = load_pos4(pos_in_seq, t, tokens)
            u0, u1, u2, u3 = conv4(x0, x1, x2, x3, x4, x5, x6, p0, p1, p2, p3, w0, w1, w2, w3, True)
        g0, g1, g2, g3 = activate4_backward(
            u0, u1, u2, u3, g0, g1, g2, g3, b, eps, is_qk, BIAS, SILU, QK_L2NORM
        )
        if unmasked:
            d1, d2, d3, e1, e2, e3 = conv_dx(g0, g1, g2, g3, p0, p1, p2, p3, w1, w2, w3, False)
            t0, t1, t2, t3 = conv_dw(
                g0, g1, g2, g3, x0, x1, x2, x3, x4, x5, x6, p0, p1, p2, p3, False
            )
        else:
            d1, d2, d3, e1, e2, e3 = conv_dx(g0, g1, g2, g3, p0, p1, p2, p3, w1, w2, w3, True)
            t0, t1, t2, t3 = conv_dw(
                g0, g1, g2, g3, x0, x1, x2, x3, x4, x5, x6, p0, p1, p2, p3, True
            )
        if step > 0:
            h0, h1, h2, h3 = g0 * w0 + c1, g1 * w0 + d1 + c2, g2 * w0 + d2 + c3, g3 * w0 + d3
            store4(d_x, d_stride, channel, mask, t, tokens, h0, h1, h2, h3)
            dw0, dw1, dw2, dw3 = dw0 + t0, dw1 + t1, dw2 + t2, dw3 + t3
            if BIAS:
                db += g0 + g1 + g2 + g3
        c1, c2, c3 = e1, e2, e3
    strip = tl.program_id(0).to(tl.int64) * (2 * keys + values) * size
    if d_weight is not None:
        d_weight += strip * TAPS
        store_tap(d_weight, channel, mask, 0, TAPS, dw0)
        store_tap(d_weight, channel, mask, 1, TAPS, dw1)
        store_tap(d_weight, channel, mask, 2, TAPS, dw2)
        store_tap(d_weight, channel, mask, 3, TAPS, dw3)
    if d_bias is not None:
        tl.store(d_bias + strip + channel, db, mask=mask)
