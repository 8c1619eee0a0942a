"""Triton kernels of residual sum and RMS or layer norm, and of the gated norm: one pass each
way, fp32, one rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm(
    x,
    branch,
    weight,
    bias,
    total,
    normed,
    size,
    stride,
    eps,
    OFFSET: tl.constexpr,
    ADDS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """total [R, D] = x + branch where ADDS, else x; normed [R, D] = total / rms(total) * (OFFSET +
    weight). Grid: R.

    Rows of `normed` are `stride` elements apart. With a bias it is a layer norm: the mean is
    subtracted first.
    """
    d = tl.arange(0, WIDTH)
    mask, offset = d < size, tl.program_id(0).to(tl.int64) * size + d
    w = tl.load(weight + d, mask=mask, other=0.0).to(tl.float32) + OFFSET
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
    tl.store(
        normed + tl.program_id(0).to(tl.int64) * stride + d,
        y.to(normed.dtype.element_ty),
        mask=mask,
    )


@triton.jit(do_not_specialize=["rows", "rows_per_program"])
def add_norm_backward(
    total,
    weight,
    d_normed,
    d_total,
    d_x,
    d_weight,
    d_bias,
    rows,
    size,
    d_total_stride,
    d_x_stride,
    eps,
    rows_per_program,
    OFFSET: tl.constexpr,
    ADDS: tl.constexpr,
    CENTERED: tl.constexpr,
    WIDTH: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """d_x [R, D] = the norm's gradient, plus d_total where ADDS; per program d_weight and d_bias
    [programs, D] unless None.

    CENTERED: a layer norm instead of an RMS norm. PREFETCH: how many rows ahead are loaded. Rows of
    d_total and d_x are their strides apart.
    """
    d = tl.arange(0, WIDTH)
    w = tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32) + OFFSET
    acc, acc_bias = tl.zeros([WIDTH], dtype=tl.float32), tl.zeros([WIDTH], dtype=tl.float32)
    for i in tl.range(rows_per_program, num_stages=PREFETCH + 1):
        row = tl.program_id(0).to(tl.int64) * rows_per_program + i
        # `!= 0` only casts: Triton's interpreter keeps a block combined with a scalar as int32, and
        # a mask has to be bool.
        mask, offset = ((row < rows) & (d < size)) != 0, row * size + d
        a = tl.load(total + offset, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(d_normed + offset, mask=mask, other=0.0).to(tl.float32)
        d_a = tl.zeros([WIDTH], dtype=tl.float32)
        # loaded before the sums, whose barriers would delay the load
        if ADDS:
            d_a = tl.load(d_total + row * d_total_stride + d, mask=mask, other=0.0).to(tl.float32)
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
        tl.store(d_x + row * d_x_stride + d, d_a.to(d_x.dtype.element_ty), mask=mask)
    if d_weight is not None:
        tl.store(d_weight + tl.program_id(0) * size + d, acc, mask=d < size)
    if d_bias is not None:
        tl.store(d_bias + tl.program_id(0) * size + d, acc_bias, mask=d < size)


@triton.jit(do_not_specialize=["count"])
def gated_norm(
    x, z, weight, out, count, size, heads, stride, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """out [T, H, D] = x / rms(x) * weight * silu(z), its tokens `stride` elements apart. Grid:
    blocks of ROWS heads of tokens.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    mask, offset = (row < count) & (d < size), row * size + d
    a = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(z + offset, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32)
    x_hat = a * tl.rsqrt(tl.sum(a * a, 1) / size + eps)[:, None]
    place = row // heads * stride + row % heads * size + d
    tl.store(out + place, (x_hat * w * b * tl.sigmoid(b)).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])
def gated_norm_backward(
    x,
    z,
    weight,
    d_out,
    normed,
    d_x,
    d_z,
    d_weight,
    count,
    size,
    eps,
    blocks,
    RECOMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """d_x, d_z [R, D], and per program d_weight [programs, D] unless None. Each program takes
    `blocks` blocks of ROWS rows.

    Where RECOMPUTE, `normed` gets the forward pass's result, which the gradient of a projection's
    weight needs.
    """
    d = tl.arange(0, WIDTH)[None, :]
    w = tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32)
    acc = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    row = tl.program_id(0).to(tl.int64) * blocks * ROWS + tl.arange(0, ROWS)[:, None]
    for _ in range(blocks):
        mask, offset = (row < count) & (d < size), row * size + d
        a = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(z + offset, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(d_out + offset, mask=mask, other=0.0).to(tl.float32)
        row += ROWS
        rstd = tl.rsqrt(tl.sum(a * a, 1) / size + eps)[:, None]
        x_hat, gate = a * rstd, tl.sigmoid(b)
        if RECOMPUTE:
            tl.store(normed + offset, (x_hat * w * b * gate).to(normed.dtype.element_ty), mask=mask)
        d_normed = g * b * gate
        d_x_hat = d_normed * w
        d_a = rstd * (d_x_hat - x_hat * (tl.sum(x_hat * d_x_hat, 1) / size)[:, None])
        d_b = g * x_hat * w * gate * (1.0 + b * (1.0 - gate))
        tl.store(d_x + offset, d_a.to(d_x.dtype.element_ty), mask=mask)
        tl.store(d_z + offset, d_b.to(d_z.dtype.element_ty), mask=mask)
        acc += d_normed * x_hat
    if d_weight is not None:
        tl.store(d_weight + tl.program_id(0) * size + d, tl.sum(acc, 0)[None, :], mask=d < size)
