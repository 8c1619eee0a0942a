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

import os

import torch
import triton
import triton.language as tl

_PTX = tl.constexpr(torch.version.hip is None and os.environ.get("TRITON_INTERPRET") != "1")
"""Whether NVIDIA's instructions can be named; Triton's interpreter runs none, AMD's chips have others."""


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)) to 2 ulp in 5 instructions; Triton's own spends 14, on denormals that 1 + e swallows."""
    if _PTX:
        e = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + e], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.sigmoid(x)


@triton.jit
def _mine(q, k, v, keys, values, BLOCK_H: tl.constexpr):
    """This program's tensor, the heads before it in the row, how many it has, the program's first, and if it is q or k."""
    block, blocks = tl.program_id(1), tl.cdiv(keys, BLOCK_H)
    if block < blocks:
        mine, before, heads, first = q, 0, keys, block * BLOCK_H
    elif block < 2 * blocks:
        mine, before, heads, first = k, keys, keys, (block - blocks) * BLOCK_H
    else:
        mine, before, heads, first = v, 2 * keys, values, (block - 2 * blocks) * BLOCK_H
    return mine, before, heads, first, block < 2 * blocks


@triton.jit
def _tap(weight, channel, ok, back: tl.constexpr, TAPS: tl.constexpr):
    """Weights [C, TAPS]: the tap that meets the token `back` places before."""
    return tl.load(weight + channel * TAPS + (TAPS - 1 - back), mask=ok & (back < TAPS), other=0.0).to(tl.float32)


@triton.jit
def _store_tap(d_weight, channel, ok, back: tl.constexpr, TAPS: tl.constexpr, value):
    tl.store(d_weight + channel * TAPS + (TAPS - 1 - back), value, mask=ok & (back < TAPS))


@triton.jit
def _token(x, stride, place, ok, t, tokens):
    """One token's channels, or their gradients, zero outside the row."""
    return tl.load(x + t.to(tl.int64) * stride + place, mask=ok & (t >= 0) & (t < tokens), other=0.0)


@triton.jit
def _tokens(x, stride, place, ok, t, tokens):
    """Token t and the three before it, the latest first."""
    return (
        _token(x, stride, place, ok, t, tokens), _token(x, stride, place, ok, t - 1, tokens),
        _token(x, stride, place, ok, t - 2, tokens), _token(x, stride, place, ok, t - 3, tokens),
    )  # fmt: skip


@triton.jit
def _wide(x0, x1, x2, x3):
    return x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)


@triton.jit
def _store(out, stride, place, ok, t, tokens, value):
    tl.store(out + t.to(tl.int64) * stride + place, value.to(out.dtype.element_ty), mask=ok & (t < tokens))


@triton.jit
def _age(ages, t, tokens):
    """Tokens past the row count as old: they are zero anyway."""
    return tl.load(ages + t, mask=t < tokens, other=3)


@triton.jit
def _kept(x, age, back: tl.constexpr, CUT: tl.constexpr):
    """x if the token `back` places before one of that age is of the same document, else zero."""
    if CUT:
        x = tl.where(age >= back, x, 0.0)
    return x


@triton.jit
def _convolved(x0, x1, x2, x3, age, w0, w1, w2, w3, CUT: tl.constexpr):
    """The convolution at a token x0, with those before it."""
    return x0 * w0 + _kept(x1, age, 1, CUT) * w1 + _kept(x2, age, 2, CUT) * w2 + _kept(x3, age, 3, CUT) * w3


@triton.jit
def _convolved4(x0, x1, x2, x3, x4, x5, x6, a0, a1, a2, a3, w0, w1, w2, w3, CUT: tl.constexpr):
    """The convolution at four tokens, the latest first."""
    return (
        _convolved(x0, x1, x2, x3, a0, w0, w1, w2, w3, CUT), _convolved(x1, x2, x3, x4, a1, w0, w1, w2, w3, CUT),
        _convolved(x2, x3, x4, x5, a2, w0, w1, w2, w3, CUT), _convolved(x3, x4, x5, x6, a3, w0, w1, w2, w3, CUT),
    )  # fmt: skip


@triton.jit
def _activate(u, shift, eps, unit, BIAS: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr):
    """[H, D] of one token; `unit`: divided by each head's L2 norm, where UNIT allows it at all."""
    if BIAS:
        u = u + shift
    if SILU:
        u = u * _sigmoid(u)
    if UNIT:
        u = u * tl.where(unit, tl.rsqrt(tl.sum(u * u, 1) + eps), 1.0)[:, None]
    return u


@triton.jit
def _deactivate(u, g, shift, eps, unit, BIAS: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr):
    """The gradient of u [H, D] from that of what `_activate` returns."""
    if BIAS:
        u = u + shift
    gate = _sigmoid(u)
    y = u * gate if SILU else u
    if UNIT:
        scale = tl.where(unit, tl.rsqrt(tl.sum(y * y, 1) + eps), 1.0)
        along = tl.where(unit, scale * scale * scale * tl.sum(y * g, 1), 0.0)
        g = g * scale[:, None] - y * along[:, None]
    if SILU:
        g = g * (gate + (y - y * gate))
    return g


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
    out, before, heads, h, unit = _mine(q, k, v, keys, values, BLOCK_H)
    h += tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    place, channel, ok, row = h * size + d, (before + h) * size + d, (h < heads) & (d < size), heads * size
    w0, w1 = _tap(weight, channel, ok, 0, TAPS), _tap(weight, channel, ok, 1, TAPS)
    w2, w3 = _tap(weight, channel, ok, 2, TAPS), _tap(weight, channel, ok, 3, TAPS)
    shift = tl.load(bias + channel, mask=ok, other=0.0).to(tl.float32) if BIAS else 0.0
    n0, n1, n2, n3 = _tokens(x, stride, channel, ok, first - 1, tokens)
    x0, x1, x2, x3 = _wide(n0, n1, n2, n3)
    n0, n1, n2, n3 = _tokens(x, stride, channel, ok, first + 3, tokens)
    for step in range(STRIP // 4):
        t = first + step * 4 + 3
        x4, x5, x6 = x0, x1, x2
        x0, x1, x2, x3 = _wide(n0, n1, n2, n3)
        n0, n1, n2, n3 = _tokens(x, stride, channel, ok, t + 4, tokens)
        a0, a1, a2, a3 = _age(ages, t, tokens), _age(ages, t - 1, tokens), _age(ages, t - 2, tokens), _age(ages, t - 3, tokens)
        if tl.minimum(tl.minimum(a0, a1), tl.minimum(a2, a3)) >= 3:
            u0, u1, u2, u3 = _convolved4(x0, x1, x2, x3, x4, x5, x6, a0, a1, a2, a3, w0, w1, w2, w3, False)
        else:
            u0, u1, u2, u3 = _convolved4(x0, x1, x2, x3, x4, x5, x6, a0, a1, a2, a3, w0, w1, w2, w3, True)
        _store(out, row, place, ok, t - 3, tokens, _activate(u3, shift, eps, unit, BIAS, SILU, UNIT))
        _store(out, row, place, ok, t - 2, tokens, _activate(u2, shift, eps, unit, BIAS, SILU, UNIT))
        _store(out, row, place, ok, t - 1, tokens, _activate(u1, shift, eps, unit, BIAS, SILU, UNIT))
        _store(out, row, place, ok, t, tokens, _activate(u0, shift, eps, unit, BIAS, SILU, UNIT))


@triton.jit
def _spread(g0, g1, g2, g3, a0, a1, a2, a3, w1, w2, w3, CUT: tl.constexpr):
    """What the gradients of four tokens, the latest first, give to the tokens before theirs.

    Returns what the second, third and fourth of the four get, then what the three tokens before the four get.
    """
    return (
        _kept(g0, a0, 1, CUT) * w1,
        _kept(g1, a1, 1, CUT) * w1 + _kept(g0, a0, 2, CUT) * w2,
        _kept(g2, a2, 1, CUT) * w1 + _kept(g1, a1, 2, CUT) * w2 + _kept(g0, a0, 3, CUT) * w3,
        _kept(g3, a3, 1, CUT) * w1 + _kept(g2, a2, 2, CUT) * w2 + _kept(g1, a1, 3, CUT) * w3,
        _kept(g3, a3, 2, CUT) * w2 + _kept(g2, a2, 3, CUT) * w3,
        _kept(g3, a3, 3, CUT) * w3,
    )


@triton.jit
def _met(g0, g1, g2, g3, x0, x1, x2, x3, a0, a1, a2, a3, back: tl.constexpr, CUT: tl.constexpr):
    """What one tap's gradient gets from four tokens' gradients and the tokens that the tap met there."""
    met = g0 * _kept(x0, a0, back, CUT) + g1 * _kept(x1, a1, back, CUT)
    return met + g2 * _kept(x2, a2, back, CUT) + g3 * _kept(x3, a3, back, CUT)


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
    d_out, before, heads, h, unit = _mine(d_q, d_k, d_v, keys, values, BLOCK_H)
    h += tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    place, channel, ok, row = h * size + d, (before + h) * size + d, (h < heads) & (d < size), heads * size
    w0, w1 = _tap(weight, channel, ok, 0, TAPS), _tap(weight, channel, ok, 1, TAPS)
    w2, w3 = _tap(weight, channel, ok, 2, TAPS), _tap(weight, channel, ok, 3, TAPS)
    shift = tl.load(bias + channel, mask=ok, other=0.0).to(tl.float32) if BIAS else 0.0
    last = first + STRIP + 3
    n0, n1, n2, n3 = _tokens(x, stride, channel, ok, last, tokens)
    x4, x5, x6, x0 = _wide(n0, n1, n2, n3)
    n0, n1, n2, n3 = _tokens(x, stride, channel, ok, last - 3, tokens)
    m0, m1, m2, m3 = _tokens(d_out, row, place, ok, last, tokens)
    zero = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
    s0, s1, s2, s3, total = zero, zero, zero, zero, zero
    p1, p2, p3 = zero, zero, zero  # what the tokens after these four give to the latest three of them
    for step in range(STRIP // 4 + 1):
        t = last - step * 4
        x0, x1, x2 = x4, x5, x6
        x3, x4, x5, x6 = _wide(n0, n1, n2, n3)
        g0, g1, g2, g3 = _wide(m0, m1, m2, m3)
        n0, n1, n2, n3 = _tokens(x, stride, channel, ok, t - 7, tokens)
        m0, m1, m2, m3 = _tokens(d_out, row, place, ok, t - 4, tokens)
        a0, a1, a2, a3 = _age(ages, t, tokens), _age(ages, t - 1, tokens), _age(ages, t - 2, tokens), _age(ages, t - 3, tokens)
        inside = tl.minimum(tl.minimum(a0, a1), tl.minimum(a2, a3)) >= 3
        if inside:
            u0, u1, u2, u3 = _convolved4(x0, x1, x2, x3, x4, x5, x6, a0, a1, a2, a3, w0, w1, w2, w3, False)
        else:
            u0, u1, u2, u3 = _convolved4(x0, x1, x2, x3, x4, x5, x6, a0, a1, a2, a3, w0, w1, w2, w3, True)
        g0 = _deactivate(u0, g0, shift, eps, unit, BIAS, SILU, UNIT)
        g1 = _deactivate(u1, g1, shift, eps, unit, BIAS, SILU, UNIT)
        g2 = _deactivate(u2, g2, shift, eps, unit, BIAS, SILU, UNIT)
        g3 = _deactivate(u3, g3, shift, eps, unit, BIAS, SILU, UNIT)
        if inside:
            d1, d2, d3, b1, b2, b3 = _spread(g0, g1, g2, g3, a0, a1, a2, a3, w1, w2, w3, False)
            e0, e1, e2, e3 = _taps(g0, g1, g2, g3, x0, x1, x2, x3, x4, x5, x6, a0, a1, a2, a3, False)
        else:
            d1, d2, d3, b1, b2, b3 = _spread(g0, g1, g2, g3, a0, a1, a2, a3, w1, w2, w3, True)
            e0, e1, e2, e3 = _taps(g0, g1, g2, g3, x0, x1, x2, x3, x4, x5, x6, a0, a1, a2, a3, True)
        if step > 0:
            _store(d_x, d_stride, channel, ok, t, tokens, g0 * w0 + p1)
            _store(d_x, d_stride, channel, ok, t - 1, tokens, g1 * w0 + d1 + p2)
            _store(d_x, d_stride, channel, ok, t - 2, tokens, g2 * w0 + d2 + p3)
            _store(d_x, d_stride, channel, ok, t - 3, tokens, g3 * w0 + d3)
            s0, s1, s2, s3 = s0 + e0, s1 + e1, s2 + e2, s3 + e3
            if BIAS:
                total += g0 + g1 + g2 + g3
        p1, p2, p3 = b1, b2, b3
    strip = tl.program_id(0).to(tl.int64) * (2 * keys + values) * size
    d_weight += strip * TAPS
    _store_tap(d_weight, channel, ok, 0, TAPS, s0)
    _store_tap(d_weight, channel, ok, 1, TAPS, s1)
    _store_tap(d_weight, channel, ok, 2, TAPS, s2)
    _store_tap(d_weight, channel, ok, 3, TAPS, s3)
    if BIAS:
        tl.store(d_bias + strip + channel, total, mask=ok)
