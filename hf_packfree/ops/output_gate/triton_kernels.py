"""Triton kernels of the output gate: one pass each way, fp32 inside."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _places(tokens, heads, size, token_stride, head_stride, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Where each (token, head) row lies in x and in the gate, and what of it is there."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    ok = (row < tokens * heads) & (d < size)
    return row * size + d, row // heads * token_stride + row % heads * head_stride + d, ok


@triton.jit(do_not_specialize=["tokens"])
def gate(
    x, z, out, tokens, heads, size, token_stride, head_stride, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """out [T, H, D] = x * sigmoid(z).  Grid: blocks of ROWS (token, head) pairs."""
    place, other, ok = _places(tokens, heads, size, token_stride, head_stride, ROWS, WIDTH)
    a = tl.load(x + place, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(z + other, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + place, (a * tl.sigmoid(b)).to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["tokens"])
def gate_backward(
    x, z, d_out, made, d_x, d_z, tokens, heads, size, token_stride, head_stride,
    REMAKES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):
    """d_x, d_z [T, H, D]; where REMAKES, `made` gets the product, which a projection's weights wait for."""
    place, other, ok = _places(tokens, heads, size, token_stride, head_stride, ROWS, WIDTH)
    a = tl.load(x + place, mask=ok, other=0.0).to(tl.float32)
    s = tl.sigmoid(tl.load(z + other, mask=ok, other=0.0).to(tl.float32))
    g = tl.load(d_out + place, mask=ok, other=0.0).to(tl.float32)
    if REMAKES:
        tl.store(made + place, (a * s).to(made.dtype.element_ty), mask=ok)
    tl.store(d_x + place, (g * s).to(d_x.dtype.element_ty), mask=ok)
    tl.store(d_z + place, (g * a * s * (1.0 - s)).to(d_z.dtype.element_ty), mask=ok)
