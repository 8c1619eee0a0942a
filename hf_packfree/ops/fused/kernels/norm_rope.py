"""Triton kernels of RMS norm and rotary embedding of one head's channels: one pass each way, fp32 inside, one rounding.

A program is one warp and works on one head at a time: sums over channels never leave it, and a token's angles are read once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rotated_with(d, half):
    """The channel that d is rotated with: d + half below half, d - half from there to 2 half; itself above."""
    return tl.where(d < half, d + half, tl.where(d < 2 * half, d - half, d))


@triton.jit
def norm_rope(
    x, weight, cos, sin, out, size, half, token_stride, head_stride, angle_stride, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):
    """out [T, H, D] = rotate(x / rms(x) * (1 + weight)).  Grid: T."""
    t, d = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    mask, is_rotary, other = d < size, d < 2 * half, _rotated_with(d, half)
    w = 1.0 + tl.load(weight + d, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + t * angle_stride + d, mask=is_rotary, other=1.0).to(tl.float32) * w
    s = tl.load(sin + t * angle_stride + d, mask=is_rotary, other=0.0).to(tl.float32)
    s *= 1.0 + tl.load(weight + other, mask=is_rotary, other=0.0).to(tl.float32)
    s = tl.where(d < half, -s, s)
    for h in range(HEADS):
        head = x + t * token_stride + h * head_stride
        a = tl.load(head + d, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(head + other, mask=is_rotary, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(a * a, 0) / size + eps)
        tl.store(out + (t * HEADS + h) * size + d, ((a * c + b * s) * rstd).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "tokens_per_program"])
def norm_rope_backward(
    x, weight, cos, sin, d_out, d_x, d_weight, tokens, size, half, token_stride, head_stride, angle_stride, eps,
    tokens_per_program, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):
    """d_x [T, H, D], and per program d_weight [programs, D] unless None."""
    d = tl.arange(0, WIDTH)
    mask, is_rotary, other = d < size, d < 2 * half, _rotated_with(d, half)
    w = 1.0 + tl.load(weight + d, mask=mask, other=0.0).to(tl.float32)
    acc = tl.zeros([WIDTH], dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * tokens_per_program
    for t in range(first, tl.minimum(first + tokens_per_program, tokens)):
        c = tl.load(cos + t * angle_stride + d, mask=is_rotary, other=1.0).to(tl.float32)
        s = tl.load(sin + t * angle_stride + other, mask=is_rotary, other=0.0).to(tl.float32)
        s = tl.where(d < half, s, -s)
        for h in range(HEADS):
            offset = (t * HEADS + h) * size
            a = tl.load(x + t * token_stride + h * head_stride + d, mask=mask, other=0.0).to(tl.float32)
            g = tl.load(d_out + offset + d, mask=mask, other=0.0).to(tl.float32) * c
            g += tl.load(d_out + offset + other, mask=is_rotary, other=0.0).to(tl.float32) * s
            rstd = tl.rsqrt(tl.sum(a * a, 0) / size + eps)
            a *= rstd
            acc += g * a
            g *= w
            g = rstd * (g - a * (tl.sum(a * g, 0) / size))
            tl.store(d_x + offset + d, g.to(d_x.dtype.element_ty), mask=mask)
    if d_weight is not None:
        tl.store(d_weight + tl.program_id(0) * size + d, acc, mask=mask)
