"""What the convolution's two Triton kernels are made of: loads that stay inside, masks at documents' edges, the activation.

Shapes: T tokens, C channels, H heads of D channels that one program works on.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

_PTX = tl.constexpr(torch.version.hip is None and os.environ.get("TRITON_INTERPRET") != "1")
"""Whether NVIDIA's instructions can be named; Triton's interpreter runs none, AMD's chips have others."""


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), without the care for denormals that Triton's own takes and that 1 + e swallows."""
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
    )  # fmt: skip


@triton.jit
def store_tap(d_weight, channel, ok, back: tl.constexpr, TAPS: tl.constexpr, value):
    tl.store(d_weight + channel * TAPS + (TAPS - 1 - back), value, mask=ok & (back < TAPS))


@triton.jit
def load(x, stride, place, ok, t, tokens):
    """One token's channels, or their gradients, zero outside the row."""
    return tl.load(x + t.to(tl.int64) * stride + place, mask=ok & (t >= 0) & (t < tokens), other=0.0)


@triton.jit
def load4(x, stride, place, ok, t, tokens):
    """Token t and the three before it, the latest first."""
    return (
        load(x, stride, place, ok, t, tokens), load(x, stride, place, ok, t - 1, tokens),
        load(x, stride, place, ok, t - 2, tokens), load(x, stride, place, ok, t - 3, tokens),
    )  # fmt: skip


@triton.jit
def widen4(x0, x1, x2, x3):
    return x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)


@triton.jit
def store(out, stride, place, ok, t, tokens, value):
    tl.store(out + t.to(tl.int64) * stride + place, value.to(out.dtype.element_ty), mask=ok & (t < tokens))


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
    )  # fmt: skip


@triton.jit
def activate(u, shift, eps, unit, BIAS: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr):
    """[H, D] of one token; `unit`: divided by each head's L2 norm, where UNIT allows it at all."""
    if BIAS:
        u = u + shift
    if SILU:
        u = u * sigmoid(u)
    if UNIT:
        u = u * tl.where(unit, tl.rsqrt(tl.sum(u * u, 1) + eps), 1.0)[:, None]
    return u


@triton.jit
def deactivate(u, g, shift, eps, unit, BIAS: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr):
    """The gradient of u [H, D] from that of what `activate` returns."""
    if BIAS:
        u = u + shift
    gate = sigmoid(u)
    y = u * gate if SILU else u
    if UNIT:
        scale = tl.where(unit, tl.rsqrt(tl.sum(y * y, 1) + eps), 1.0)
        along = tl.where(unit, scale * scale * scale * tl.sum(y * g, 1), 0.0)
        g = g * scale[:, None] - y * along[:, None]
    if SILU:
        g = g * (gate + (y - y * gate))
    return g
