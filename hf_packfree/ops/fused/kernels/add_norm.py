"""Triton kernels of residual sum and RMS norm: one pass forward, one pass backward, fp32 inside, one rounding."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm(x, branch, weight, total, normed, size, eps, ADDS: tl.constexpr, WIDTH: tl.constexpr):
    """total [R, D] = x + branch where ADDS, else x; normed [R, D] = total / rms(total) * (1 + weight).  Grid: R."""
    d = tl.arange(0, WIDTH)
    mask, offset = d < size, tl.program_id(0).to(tl.int64) * size + d
    w = 1.0 + tl.load(weight + d, mask=mask, other=0.0).to(tl.float32)
    a = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        b = tl.load(branch + offset, mask=mask, other=0.0).to(tl.float32)
        rounded = (a + b).to(total.dtype.element_ty)
        tl.store(total + offset, rounded, mask=mask)
        a = rounded.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(a * a, 0) / size + eps)
    tl.store(normed + offset, (a * rstd * w).to(normed.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "rows_per_program"])
def add_norm_backward(
    total, weight, d_normed, d_total, d_x, d_weight, rows, size, eps, rows_per_program,
    ADDS: tl.constexpr, WIDTH: tl.constexpr, PREFETCH: tl.constexpr,
):
    """d_x [R, D] = the norm's gradient, plus d_total where ADDS; per program d_weight [programs, D] unless None.

    PREFETCH: how many rows ahead are loaded.
    """
    d = tl.arange(0, WIDTH)
    w = 1.0 + tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32)
    acc = tl.zeros([WIDTH], dtype=tl.float32)
    for i in tl.range(rows_per_program, num_stages=PREFETCH + 1):
        row = tl.program_id(0).to(tl.int64) * rows_per_program + i
        # `!= 0` changes nothing: Triton's interpreter keeps a block combined with a scalar as int32, and a mask has to be bool.
        mask, offset = ((row < rows) & (d < size)) != 0, row * size + d
        a = tl.load(total + offset, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(d_normed + offset, mask=mask, other=0.0).to(tl.float32)
        d_a = tl.zeros([WIDTH], dtype=tl.float32)
        if ADDS:  # loaded before the sums, whose barriers would hold it up
            d_a = tl.load(d_total + offset, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(a * a, 0) / size + eps)
        a *= rstd
        acc += g * a
        g *= w
        d_a += rstd * (g - a * (tl.sum(a * g, 0) / size))
        tl.store(d_x + offset, d_a.to(d_x.dtype.element_ty), mask=mask)
    if d_weight is not None:
        tl.store(d_weight + tl.program_id(0) * size + d, acc, mask=d < size)
