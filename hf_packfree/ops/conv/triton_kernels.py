"""Triton kernels of the causal convolution: a strip of tokens is walked four at a time, its taps kept in registers.

Every token and every gradient is read once (a few more per strip), and four are asked for before the first is worked on,
which is what keeps the memory busy.  What a tap would read from the document before is masked by `age`, the token's
place in its document.  Written out for four taps; shorter filters read zeros.

Shapes: T tokens, H heads of D channels each that one call works on, S strips.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tap(weight, channel, ok, back: tl.constexpr, TAPS: tl.constexpr):
    """Weights [H * D, TAPS]: the tap that meets the token `back` places before."""
    return tl.load(weight + channel * TAPS + (TAPS - 1 - back), mask=ok & (back < TAPS), other=0.0).to(tl.float32)


@triton.jit
def _token(x, stride, channel, ok, t, tokens):
    """One token's channels in fp32, zero outside the row."""
    return tl.load(x + t.to(tl.int64) * stride + channel, mask=ok & (t >= 0) & (t < tokens), other=0.0).to(tl.float32)


@triton.jit
def _kept(x, age, back: tl.constexpr):
    """x if the token `back` places before one of that age is of the same document, else zero."""
    return tl.where(age >= back, x, 0.0)


@triton.jit
def _age(ages, t, tokens):
    return tl.load(ages + t, mask=t < tokens, other=0)


@triton.jit
def _preactivation(x0, x1, x2, x3, age, w0, w1, w2, w3, shift):
    """The convolution at a token x0, with those before it."""
    return x0 * w0 + _kept(x1, age, 1) * w1 + _kept(x2, age, 2) * w2 + _kept(x3, age, 3) * w3 + shift


@triton.jit
def _activate(u, eps, SILU: tl.constexpr, UNIT: tl.constexpr):
    """[H, D] of one token."""
    if SILU:
        u = u * tl.sigmoid(u)
    if UNIT:
        u = u * tl.rsqrt(tl.sum(u * u, 1) + eps)[:, None]
    return u


@triton.jit
def _deactivate(u, g, eps, SILU: tl.constexpr, UNIT: tl.constexpr):
    """The gradient of u [H, D] from that of what `_activate` returns."""
    gate = tl.sigmoid(u)
    if UNIT:
        y = u * gate if SILU else u
        scale = tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
        y = y * scale
        g = scale * (g - y * tl.sum(y * g, 1)[:, None])
    if SILU:
        g = g * gate * (1.0 + u * (1.0 - gate))
    return g


@triton.jit
def _store(out, stride, channel, ok, t, tokens, value):
    tl.store(out + t.to(tl.int64) * stride + channel, value.to(out.dtype.element_ty), mask=ok & (t < tokens))


@triton.jit(do_not_specialize=["tokens"])
def convolve(
    x, weight, bias, ages, out, tokens, stride, heads, size, eps,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr,
    STRIP: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out [T, H, D] = act(conv(x)), each head divided by its L2 norm if UNIT.  Grid: (strips, blocks of heads)."""
    first = tl.program_id(0) * STRIP
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    ok, channel, row = (h < heads) & (d < size), h * size + d, heads * size
    w0, w1 = _tap(weight, channel, ok, 0, TAPS), _tap(weight, channel, ok, 1, TAPS)
    w2, w3 = _tap(weight, channel, ok, 2, TAPS), _tap(weight, channel, ok, 3, TAPS)
    shift = tl.load(bias + channel, mask=ok, other=0.0).to(tl.float32) if BIAS else 0.0
    x1, x2 = _token(x, stride, channel, ok, first - 1, tokens), _token(x, stride, channel, ok, first - 2, tokens)
    x3 = _token(x, stride, channel, ok, first - 3, tokens)
    for step in range(STRIP // 4):
        t = first + step * 4
        y0, y1 = _token(x, stride, channel, ok, t, tokens), _token(x, stride, channel, ok, t + 1, tokens)
        y2, y3 = _token(x, stride, channel, ok, t + 2, tokens), _token(x, stride, channel, ok, t + 3, tokens)
        a0, a1, a2, a3 = _age(ages, t, tokens), _age(ages, t + 1, tokens), _age(ages, t + 2, tokens), _age(ages, t + 3, tokens)
        u0 = _activate(_preactivation(y0, x1, x2, x3, a0, w0, w1, w2, w3, shift), eps, SILU, UNIT)
        u1 = _activate(_preactivation(y1, y0, x1, x2, a1, w0, w1, w2, w3, shift), eps, SILU, UNIT)
        u2 = _activate(_preactivation(y2, y1, y0, x1, a2, w0, w1, w2, w3, shift), eps, SILU, UNIT)
        u3 = _activate(_preactivation(y3, y2, y1, y0, a3, w0, w1, w2, w3, shift), eps, SILU, UNIT)
        _store(out, row, channel, ok, t, tokens, u0)
        _store(out, row, channel, ok, t + 1, tokens, u1)
        _store(out, row, channel, ok, t + 2, tokens, u2)
        _store(out, row, channel, ok, t + 3, tokens, u3)
        x1, x2, x3 = y3, y2, y1


@triton.jit(do_not_specialize=["tokens"])
def convolve_backward(
    x, weight, bias, ages, d_out, d_x, d_weight, tokens, stride, d_stride, heads, size, eps,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr,
    STRIP: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """d_x [T, H * D] from d_out [T, H, D], and per strip d_weight [S, 5, H * D]: newest tap first, then the bias.

    Walks from the strip's end, beginning with the four tokens past it, whose gradients reach back into the strip.
    """
    first = tl.program_id(0) * STRIP
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    ok, channel, row = (h < heads) & (d < size), h * size + d, heads * size
    w0, w1 = _tap(weight, channel, ok, 0, TAPS), _tap(weight, channel, ok, 1, TAPS)
    w2, w3 = _tap(weight, channel, ok, 2, TAPS), _tap(weight, channel, ok, 3, TAPS)
    shift = tl.load(bias + channel, mask=ok, other=0.0).to(tl.float32) if BIAS else 0.0
    last = first + STRIP + 3
    x0, x1 = _token(x, stride, channel, ok, last, tokens), _token(x, stride, channel, ok, last - 1, tokens)
    x2 = _token(x, stride, channel, ok, last - 2, tokens)
    zero = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
    s0, s1, s2, s3, total = zero, zero, zero, zero, zero
    later1, later2, later3 = zero, zero, zero  # what the three tokens after these four pass back, each to its taps
    later12, later13, later23 = zero, zero, zero
    for step in range(STRIP // 4 + 1):
        t = last - step * 4
        x3, x4 = _token(x, stride, channel, ok, t - 3, tokens), _token(x, stride, channel, ok, t - 4, tokens)
        x5, x6 = _token(x, stride, channel, ok, t - 5, tokens), _token(x, stride, channel, ok, t - 6, tokens)
        g0, g1 = _token(d_out, row, channel, ok, t, tokens), _token(d_out, row, channel, ok, t - 1, tokens)
        g2, g3 = _token(d_out, row, channel, ok, t - 2, tokens), _token(d_out, row, channel, ok, t - 3, tokens)
        a0, a1, a2, a3 = _age(ages, t, tokens), _age(ages, t - 1, tokens), _age(ages, t - 2, tokens), _age(ages, t - 3, tokens)
        g0 = _deactivate(_preactivation(x0, x1, x2, x3, a0, w0, w1, w2, w3, shift), g0, eps, SILU, UNIT)
        g1 = _deactivate(_preactivation(x1, x2, x3, x4, a1, w0, w1, w2, w3, shift), g1, eps, SILU, UNIT)
        g2 = _deactivate(_preactivation(x2, x3, x4, x5, a2, w0, w1, w2, w3, shift), g2, eps, SILU, UNIT)
        g3 = _deactivate(_preactivation(x3, x4, x5, x6, a3, w0, w1, w2, w3, shift), g3, eps, SILU, UNIT)
        if step > 0:
            _store(d_x, d_stride, channel, ok, t, tokens, g0 * w0 + later1 + later2 + later3)
            _store(d_x, d_stride, channel, ok, t - 1, tokens, g1 * w0 + _kept(g0, a0, 1) * w1 + later12 + later13)
            found = g2 * w0 + _kept(g1, a1, 1) * w1 + _kept(g0, a0, 2) * w2 + later23
            _store(d_x, d_stride, channel, ok, t - 2, tokens, found)
            found = g3 * w0 + _kept(g2, a2, 1) * w1 + _kept(g1, a1, 2) * w2 + _kept(g0, a0, 3) * w3
            _store(d_x, d_stride, channel, ok, t - 3, tokens, found)
            s0 += g0 * x0 + g1 * x1 + g2 * x2 + g3 * x3
            s1 += g0 * _kept(x1, a0, 1) + g1 * _kept(x2, a1, 1) + g2 * _kept(x3, a2, 1) + g3 * _kept(x4, a3, 1)
            s2 += g0 * _kept(x2, a0, 2) + g1 * _kept(x3, a1, 2) + g2 * _kept(x4, a2, 2) + g3 * _kept(x5, a3, 2)
            s3 += g0 * _kept(x3, a0, 3) + g1 * _kept(x4, a1, 3) + g2 * _kept(x5, a2, 3) + g3 * _kept(x6, a3, 3)
            if BIAS:
                total += g0 + g1 + g2 + g3
        later1, later2, later3 = _kept(g3, a3, 1) * w1, _kept(g2, a2, 2) * w2, _kept(g1, a1, 3) * w3
        later12, later13, later23 = _kept(g3, a3, 2) * w2, _kept(g2, a2, 3) * w3, _kept(g3, a3, 3) * w3
        x0, x1, x2 = x4, x5, x6
    place = d_weight + tl.program_id(0).to(tl.int64) * 5 * row + channel
    tl.store(place, s0, mask=ok)
    tl.store(place + row, s1, mask=ok)
    tl.store(place + 2 * row, s2, mask=ok)
    tl.store(place + 3 * row, s3, mask=ok)
    tl.store(place + 4 * row, total, mask=ok)
