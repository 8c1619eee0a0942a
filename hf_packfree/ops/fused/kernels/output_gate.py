"""Triton kernels of the output gate: one pass each way, fp32 inside."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _offsets(tokens, heads, size, token_stride, head_stride, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets of each (token, head) row in x and in z, and the mask."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    mask = (row < tokens * heads) & (d < size)
    return row * size + d, row // heads * token_stride + row % heads * head_stride + d, mask


@triton.jit(do_not_specialize=["tokens"])
def output_gate(
    x, z, out, tokens, heads, size, token_stride, head_stride, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """out [T, H, D] = x * sigmoid(z).  Grid: blocks of ROWS (token, head) pairs."""
    offset, z_offset, mask = _offsets(tokens, heads, size, token_stride, head_stride, ROWS, WIDTH)
    a = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(z + z_offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offset, (a * tl.sigmoid(b)).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def output_gate_backward(
    x, z, d_out, gated, d_x, d_z, tokens, heads, size, token_stride, head_stride,
    RECOMPUTE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):
    """d_x, d_z [T, H, D]; where RECOMPUTE, `gated` gets the product, which the gradient of a projection's weight needs."""
    offset, z_offset, mask = _offsets(tokens, heads, size, token_stride, head_stride, ROWS, WIDTH)
    a = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(tl.load(z + z_offset, mask=mask, other=0.0).to(tl.float32))
    g = tl.load(d_out + offset, mask=mask, other=0.0).to(tl.float32)
    if RECOMPUTE:
        tl.store(gated + offset, (a * s).to(gated.dtype.element_ty), mask=mask)
    tl.store(d_x + offset, (g * s).to(d_x.dtype.element_ty), mask=mask)
    tl.store(d_z + offset, (g * a * s * (1.0 - s)).to(d_z.dtype.element_ty), mask=mask)
