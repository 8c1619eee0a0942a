"""Triton kernels of residual sum and RMS norm: one pass forward, one pass backward, fp32 inside, one rounding."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm(x, branch, weight, total, normed, size, eps, ADDS: tl.constexpr, WIDTH: tl.constexpr):
    """total [R, D] = x + branch where ADDS, else x; normed [R, D] = total / rms(total) * (1 + weight).  Grid: R."""
    d = tl.arange(0, WIDTH)
    ok, place = d < size, tl.program_id(0).to(tl.int64) * size + d
    w = 1.0 + tl.load(weight + d, mask=ok, other=0.0).to(tl.float32)
    a = tl.load(x + place, mask=ok, other=0.0).to(tl.float32)
    if ADDS:
        b = tl.load(branch + place, mask=ok, other=0.0).to(tl.float32)
        rounded = (a + b).to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=ok)
        a = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(a * a, 0) / size + eps)
    tl.store(normed + place, (a * scale * w).to(normed.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["rows", "tiles"])
def add_norm_backward(
    total, weight, d_normed, d_total, d_x, d_weight, rows, size, eps, tiles,
    ADDS: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr,
):
    """d_x [R, D] = the norm's gradient, plus d_total where ADDS; per program d_weight [programs, D].

    Each program takes `tiles` rows, and asks for them AHEAD.
    """
    d = tl.arange(0, WIDTH)
    w = 1.0 + tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32)
    sums = tl.zeros([WIDTH], dtype=tl.float32)
    for tile in tl.range(tiles, num_stages=AHEAD + 1):
        row = tl.program_id(0).to(tl.int64) * tiles + tile
        ok, place = (row < rows) & (d < size), row * size + d
        a = tl.load(total + place, mask=ok, other=0.0).to(tl.float32)
        g = tl.load(d_normed + place, mask=ok, other=0.0).to(tl.float32)
        h = tl.zeros([WIDTH], dtype=tl.float32)
        if ADDS:  # read before the sums, whose barriers would hold it up
            h = tl.load(d_total + place, mask=ok, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(a * a, 0) / size + eps)
        a *= scale
        sums += g * a
        g *= w
        h += scale * (g - a * (tl.sum(a * g, 0) / size))
        tl.store(d_x + place, h.to(d_x.dtype.element_ty), mask=ok)
    tl.store(d_weight + tl.program_id(0) * size + d, sums, mask=d < size)
