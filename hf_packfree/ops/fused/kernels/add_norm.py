"""Triton kernels of residual sum and RMS or layer norm: one pass forward, one pass backward, fp32 inside, one rounding."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm(x, branch, weight, bias, total, normed, size, eps, ADDS: tl.constexpr, WIDTH: tl.constexpr):
    """total [R, D] = x + branch where ADDS, else x; normed [R, D] = total / rms(total) * (1 + weight).  Grid: R.

    With a bias it is a layer norm: the mean is subtracted first, and weight is not added to one.
    """
    d = tl.arange(0, WIDTH)
    mask, offset = d < size, tl.program_id(0).to(tl.int64) * size + d
    w = tl.load(weight + d, mask=mask, other=0.0).to(tl.float32)
    w = w + 1.0 if bias is None else w
    a = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        b = tl.load(branch + offset, mask=mask, other=0.0).to(tl.float32)
        rounded = (a + b).to(total.dtype.element_ty)
        tl.store(total + offset, rounded, mask=mask)
        a = rounded.to(tl.float32)
    if bias is not None:
        a = tl.where(mask, a - tl.sum(a, 0) / size, 0.0)
    y = a * tl.rsqrt(tl.sum(a * a, 0) / size + eps) * w
    if bias is not None:
        y += tl.load(bias + d, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + offset, y.to(normed.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "rows_per_program"])
def add_norm_backward(
    total, weight, d_normed, d_total, d_x, d_weight, d_bias, rows, size, eps, rows_per_program,
    ADDS: tl.constexpr, CENTERED: tl.constexpr, WIDTH: tl.constexpr, PREFETCH: tl.constexpr,
):
    """d_x [R, D] = the norm's gradient, plus d_total where ADDS; per program d_weight and d_bias [programs, D] unless None.

    CENTERED: it is a layer norm.  PREFETCH: how many rows ahead are loaded.
    """
    d = tl.arange(0, WIDTH)
    w = tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32)
    w = w if CENTERED else w + 1.0
    acc, acc_bias = tl.zeros([WIDTH], dtype=tl.float32), tl.zeros([WIDTH], dtype=tl.float32)
    for i in tl.range(rows_per_program, num_stages=PREFETCH + 1):
        row = tl.program_id(0).to(tl.int64) * rows_per_program + i
        # `!= 0` changes nothing: Triton's interpreter keeps a block combined with a scalar as int32, and a mask has to be bool.
        mask, offset = ((row < rows) & (d < size)) != 0, row * size + d
        a = tl.load(total + offset, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(d_normed + offset, mask=mask, other=0.0).to(tl.float32)
        d_a = tl.zeros([WIDTH], dtype=tl.float32)
        if ADDS:  # loaded before the sums, whose barriers would hold it up
            d_a = tl.load(d_total + offset, mask=mask, other=0.0).to(tl.float32)
        if CENTERED:
            a = tl.where(mask, a - tl.sum(a, 0) / size, 0.0)
            acc_bias += g
        rstd = tl.rsqrt(tl.sum(a * a, 0) / size + eps)
        a *= rstd
        acc += g * a
        g *= w
        if CENTERED:
            d_a -= rstd * (tl.sum(g, 0) / size)
        d_a += rstd * (g - a * (tl.sum(a * g, 0) / size))
        tl.store(d_x + offset, d_a.to(d_x.dtype.element_ty), mask=mask)
    if d_weight is not None:
        tl.store(d_weight + tl.program_id(0) * size + d, acc, mask=d < size)
    if d_bias is not None:
        tl.store(d_bias + tl.program_id(0) * size + d, acc_bias, mask=d < size)
