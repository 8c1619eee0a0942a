"""Triton kernels of the gated RMS norm: one pass forward, one pass backward, fp32 inside, one rounding."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _far(row, count, d, size, rows, HEADS: tl.constexpr, MOVED: tl.constexpr):
    """Where these rows lie in x, whose tokens may be moved."""
    if MOVED:
        token = tl.load(rows + row // HEADS, mask=row < count, other=0).to(tl.int64)
        row = token * HEADS + row % HEADS
    return row * size + d


@triton.jit(do_not_specialize=["count"])
def gated_norm(
    x, z, weight, rows, out, count, size, eps,
    HEADS: tl.constexpr, MOVED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):
    """out [R, D] = x / rms(x) * weight * silu(z).  Grid: blocks of ROWS rows.

    R = T HEADS; where MOVED, `rows` [T] says which token of x, and of its gradient, belongs to a token of the others.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    ok, place = (row < count) & (d < size), row * size + d
    a = tl.load(x + _far(row, count, d, size, rows, HEADS, MOVED), mask=ok, other=0.0).to(tl.float32)
    b = tl.load(z + place, mask=ok, other=0.0).to(tl.float32)
    w = tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32)
    unit = a * tl.rsqrt(tl.sum(a * a, 1) / size + eps)[:, None]
    tl.store(out + place, (unit * w * b * tl.sigmoid(b)).to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["count"])
def gated_norm_backward(
    x, z, weight, rows, d_out, made, d_x, d_z, d_weight, count, size, eps, tiles,
    HEADS: tl.constexpr, MOVED: tl.constexpr, REMAKES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):
    """d_x, d_z [R, D], and per program d_weight [programs, D].  Each program takes `tiles` blocks of ROWS rows.

    Where REMAKES, `made` gets what the forward pass made, which a projection's weights wait for.
    """
    d = tl.arange(0, WIDTH)[None, :]
    w = tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    row = tl.program_id(0).to(tl.int64) * tiles * ROWS + tl.arange(0, ROWS)[:, None]
    next_far = _far(row, count, d, size, rows, HEADS, MOVED)
    for _ in range(tiles):
        ok, place, far = (row < count) & (d < size), row * size + d, next_far
        a = tl.load(x + far, mask=ok, other=0.0).to(tl.float32)
        b = tl.load(z + place, mask=ok, other=0.0).to(tl.float32)
        g = tl.load(d_out + place, mask=ok, other=0.0).to(tl.float32)
        row += ROWS
        next_far = _far(row, count, d, size, rows, HEADS, MOVED)  # looked up before it is waited for
        scale = tl.rsqrt(tl.sum(a * a, 1) / size + eps)[:, None]
        unit, gate = a * scale, tl.sigmoid(b)
        if REMAKES:
            tl.store(made + place, (unit * w * b * gate).to(made.dtype.element_ty), mask=ok)
        through = g * b * gate
        d_unit = through * w
        d_a = scale * (d_unit - unit * (tl.sum(unit * d_unit, 1) / size)[:, None])
        d_b = g * unit * w * gate * (1.0 + b * (1.0 - gate))
        tl.store(d_x + far, d_a.to(d_x.dtype.element_ty), mask=ok)
        tl.store(d_z + place, d_b.to(d_z.dtype.element_ty), mask=ok)
        total += through * unit
    tl.store(d_weight + tl.program_id(0) * size + d, tl.sum(total, 0)[None, :], mask=d < size)
