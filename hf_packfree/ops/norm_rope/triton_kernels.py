"""Triton kernels of RMS norm and rotary embedding of one head's channels: one pass each way, fp32 inside, one rounding."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows(tokens, heads, row_stride, head_stride, ROWS: tl.constexpr, block):
    """Which (token, head) each row is: where it lies in x, its token, and whether it is there."""
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    t, h = row // heads, row % heads
    return row, t, t * row_stride + h * head_stride, row < tokens * heads


@triton.jit
def _partner(d, half):
    """The channel that d is rotated with: d + half below half, d - half from there to 2 half; itself above."""
    return tl.where(d < half, d + half, tl.where(d < 2 * half, d - half, d))


@triton.jit(do_not_specialize=["tokens"])
def norm_rope(
    x, weight, cos, sin, out, tokens, heads, size, half, row_stride, head_stride, angle_stride, eps,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out [T, H, D] = rotate(x / rms(x) * (1 + weight)).  Grid: blocks of ROWS (token, head) pairs."""
    d = tl.arange(0, WIDTH)[None, :]
    row, t, place, there = _rows(tokens, heads, row_stride, head_stride, ROWS, tl.program_id(0))
    ok, turns, other = there & (d < size), d < 2 * half, _partner(d, half)
    a = tl.load(x + place + d, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(x + place + other, mask=ok, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(a * a, 1) / size + eps)[:, None]
    a *= scale * (1.0 + tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32))
    b *= scale * (1.0 + tl.load(weight + other, mask=d < size, other=0.0).to(tl.float32))
    c = tl.load(cos + t * angle_stride + d, mask=there & turns, other=1.0).to(tl.float32)
    s = tl.load(sin + t * angle_stride + d, mask=there & turns, other=0.0).to(tl.float32)
    found = a * c + tl.where(d < half, -b, b) * s
    tl.store(out + row * size + d, found.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["tokens"])
def norm_rope_backward(
    x, weight, cos, sin, d_out, d_x, d_weight, tokens, heads, size, half, row_stride, head_stride, angle_stride, eps,
    tiles, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """d_x [T, H, D], and per program d_weight [programs, D].  Each program takes `tiles` blocks of ROWS pairs."""
    d = tl.arange(0, WIDTH)[None, :]
    turns, other = d < 2 * half, _partner(d, half)
    w = 1.0 + tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    for tile in range(tiles):
        block = tl.program_id(0) * tiles + tile
        row, t, place, there = _rows(tokens, heads, row_stride, head_stride, ROWS, block)
        ok = there & (d < size)
        g = tl.load(d_out + row * size + d, mask=ok, other=0.0).to(tl.float32)
        h = tl.load(d_out + row * size + other, mask=ok, other=0.0).to(tl.float32)
        c = tl.load(cos + t * angle_stride + d, mask=there & turns, other=1.0).to(tl.float32)
        s = tl.load(sin + t * angle_stride + other, mask=there & turns, other=0.0).to(tl.float32)
        g = g * c + tl.where(d < half, h, -h) * s
        a = tl.load(x + place + d, mask=ok, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(a * a, 1) / size + eps)[:, None]
        a *= scale
        total += g * a
        g *= w
        g = scale * (g - a * (tl.sum(a * g, 1) / size)[:, None])
        tl.store(d_x + row * size + d, g.to(d_x.dtype.element_ty), mask=ok)
    tl.store(d_weight + tl.program_id(0) * size + d, tl.sum(total, 0)[None, :], mask=d < size)
