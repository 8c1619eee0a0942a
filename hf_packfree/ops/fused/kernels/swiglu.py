"""Triton kernels of the gated product: one pass each way, fp32 inside."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _offsets(tokens, width, BLOCK: tl.constexpr):
    """Offsets of the program's elements of [T, F], and the mask."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return offset, offset < tokens.to(tl.int64) * width


@triton.jit
def _product(a, b, s, dtype):
    """silu(a) * b; both factors are rounded to `dtype`, as by torch, which stores the first."""
    return (a * s).to(dtype).to(tl.float32) * b


@triton.jit(do_not_specialize=["tokens"])
def swiglu(gate, up, out, out_stride, tokens, width, DENSE: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, F] = silu(gate) * up, rows of `out_stride` elements unless DENSE.  Grid: blocks of BLOCK elements."""
    offset, mask = _offsets(tokens, width, BLOCK)
    a = tl.load(gate + offset, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(up + offset, mask=mask, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    place = offset if DENSE else offset // width * out_stride + offset % width
    tl.store(out + place, _product(a, b, tl.sigmoid(a), dtype).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def swiglu_backward(gate, up, d_out, d_gate, d_up, tokens, width, BLOCK: tl.constexpr):
    """d_gate, d_up [T, F]; the product itself overwrites `d_out` [T, F], for the gradient of the projection's weight."""
    offset, mask = _offsets(tokens, width, BLOCK)
    a = tl.load(gate + offset, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(up + offset, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(d_out + offset, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    dtype = d_out.dtype.element_ty
    tl.store(d_gate + offset, (d * b * s * (1.0 + a * (1.0 - s))).to(dtype), mask=mask)
    tl.store(d_up + offset, (d * a * s).to(dtype), mask=mask)
    tl.store(d_out + offset, _product(a, b, s, dtype).to(dtype), mask=mask)
