"""Triton kernels of RMS norm and rotary embedding of one head's channels: one pass each way, fp32 inside, one rounding.

A program is one warp and works on one head at a time: sums over channels never leave it, and a token's angles are read once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _partner(d, half):
    """The channel that d is rotated with: d + half below half, d - half from there to 2 half; itself above."""
    return tl.where(d < half, d + half, tl.where(d < 2 * half, d - half, d))


@triton.jit
def norm_rope(
    x, weight, cos, sin, out, size, half, row_stride, head_stride, angle_stride, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):
    """out [T, H, D] = rotate(x / rms(x) * (1 + weight)).  Grid: T."""
    t, d = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    ok, turns, other = d < size, d < 2 * half, _partner(d, half)
    w = 1.0 + tl.load(weight + d, mask=ok, other=0.0).to(tl.float32)
    c = tl.load(cos + t * angle_stride + d, mask=turns, other=1.0).to(tl.float32) * w
    s = tl.load(sin + t * angle_stride + d, mask=turns, other=0.0).to(tl.float32)
    s *= 1.0 + tl.load(weight + other, mask=turns, other=0.0).to(tl.float32)
    s = tl.where(d < half, -s, s)
    for h in range(HEADS):
        mine = x + t * row_stride + h * head_stride
        a = tl.load(mine + d, mask=ok, other=0.0).to(tl.float32)
        b = tl.load(mine + other, mask=turns, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(a * a, 0) / size + eps)
        tl.store(out + (t * HEADS + h) * size + d, ((a * c + b * s) * scale).to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def norm_rope_backward(
    x, weight, cos, sin, d_out, d_x, d_weight, tokens, size, half, row_stride, head_stride, angle_stride, eps, tiles,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):
    """d_x [T, H, D], and per program d_weight [programs, D].  Each program takes `tiles` tokens."""
    d = tl.arange(0, WIDTH)
    ok, turns, other = d < size, d < 2 * half, _partner(d, half)
    w = 1.0 + tl.load(weight + d, mask=ok, other=0.0).to(tl.float32)
    total = tl.zeros([WIDTH], dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * tiles
    for t in range(first, tl.minimum(first + tiles, tokens)):
        c = tl.load(cos + t * angle_stride + d, mask=turns, other=1.0).to(tl.float32)
        s = tl.load(sin + t * angle_stride + other, mask=turns, other=0.0).to(tl.float32)
        s = tl.where(d < half, s, -s)
        for h in range(HEADS):
            place = (t * HEADS + h) * size
            a = tl.load(x + t * row_stride + h * head_stride + d, mask=ok, other=0.0).to(tl.float32)
            g = tl.load(d_out + place + d, mask=ok, other=0.0).to(tl.float32) * c
            g += tl.load(d_out + place + other, mask=turns, other=0.0).to(tl.float32) * s
            scale = tl.rsqrt(tl.sum(a * a, 0) / size + eps)
            a *= scale
            total += g * a
            g *= w
            g = scale * (g - a * (tl.sum(a * g, 0) / size))
            tl.store(d_x + place + d, g.to(d_x.dtype.element_ty), mask=ok)
    tl.store(d_weight + tl.program_id(0) * size + d, total, mask=ok)
