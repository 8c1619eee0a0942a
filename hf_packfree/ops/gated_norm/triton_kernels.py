"""Triton kernels of the gated RMS norm: one pass forward, one pass backward, fp32 inside, one rounding."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def gated_norm(x, z, weight, out, rows, size, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """out [R, D] = x / rms(x) * weight * silu(z).  Grid: blocks of ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    ok, place = (row < rows) & (d < size), row * size + d
    a = tl.load(x + place, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(z + place, mask=ok, other=0.0).to(tl.float32)
    w = tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32)
    unit = a * tl.rsqrt(tl.sum(a * a, 1) / size + eps)[:, None]
    tl.store(out + place, (unit * w * b * tl.sigmoid(b)).to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["rows"])
def gated_norm_backward(
    x, z, weight, d_out, d_x, d_z, d_weight, rows, size, eps, tiles, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """d_x, d_z [R, D], and per program d_weight [programs, D].  Each program takes `tiles` blocks of ROWS rows."""
    d = tl.arange(0, WIDTH)[None, :]
    w = tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    for tile in range(tiles):
        row = (tl.program_id(0).to(tl.int64) * tiles + tile) * ROWS + tl.arange(0, ROWS)[:, None]
        ok, place = (row < rows) & (d < size), row * size + d
        a = tl.load(x + place, mask=ok, other=0.0).to(tl.float32)
        b = tl.load(z + place, mask=ok, other=0.0).to(tl.float32)
        g = tl.load(d_out + place, mask=ok, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(a * a, 1) / size + eps)[:, None]
        unit, gate = a * scale, tl.sigmoid(b)
        through = g * b * gate
        d_unit = through * w
        d_a = scale * (d_unit - unit * (tl.sum(unit * d_unit, 1) / size)[:, None])
        d_b = g * unit * w * gate * (1.0 + b * (1.0 - gate))
        tl.store(d_x + place, d_a.to(d_x.dtype.element_ty), mask=ok)
        tl.store(d_z + place, d_b.to(d_z.dtype.element_ty), mask=ok)
        total += through * unit
    tl.store(d_weight + tl.program_id(0) * size + d, tl.sum(total, 0)[None, :], mask=d < size)
