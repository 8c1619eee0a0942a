"""Triton kernels of the gated RMS norm: one pass forward, one pass backward, fp32 inside, one rounding."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def gated_norm(x, z, weight, out, count, size, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """out [R, D] = x / rms(x) * weight * silu(z).  Grid: blocks of ROWS rows, each a head of a token."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    mask, offset = (row < count) & (d < size), row * size + d
    a = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(z + offset, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + d, mask=d < size, other=0.0).to(tl.float32)
    x_hat = a * tl.rsqrt(tl.sum(a * a, 1) / size + eps)[:, None]
    tl.store(out + offset, (x_hat * w * b * tl.sigmoid(b)).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])
def gated_norm_backward(
    x, z, weight, d_out, normed, d_x, d_z, d_weight, count, size, eps, blocks,
    RECOMPUTE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):
    """d_x, d_z [R, D], and per program d_weight [programs, D] unless None.  Each program takes `blocks` blocks of ROWS rows.

    Where RECOMPUTE, `normed` gets the forward pass's result, which the gradient of a projection's weight needs.
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
