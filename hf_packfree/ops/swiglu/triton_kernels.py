"""Triton kernels of the gated product: one pass each way, fp32 inside."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _places(tokens, width, BLOCK: tl.constexpr):
    """The program's elements of [T, F], and which of them are there."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return place, place < tokens.to(tl.int64) * width


@triton.jit
def _product(a, b, s, dtype):
    """silu(a) * b; both factors are of `dtype`, as where torch makes the first by itself."""
    return (a * s).to(dtype).to(tl.float32) * b


@triton.jit(do_not_specialize=["tokens"])
def gated(gate, up, out, tokens, width, BLOCK: tl.constexpr):
    """out [T, F] = silu(gate) * up.  Grid: blocks of BLOCK elements."""
    place, ok = _places(tokens, width, BLOCK)
    a = tl.load(gate + place, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(up + place, mask=ok, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    tl.store(out + place, _product(a, b, tl.sigmoid(a), dtype).to(dtype), mask=ok)


@triton.jit(do_not_specialize=["tokens"])
def gated_backward(gate, up, d_out, d_gate, d_up, tokens, width, BLOCK: tl.constexpr):
    """d_gate, d_up [T, F]; `d_out` [T, F] is overwritten by the product itself, which the projection's weights wait for."""
    place, ok = _places(tokens, width, BLOCK)
    a = tl.load(gate + place, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(up + place, mask=ok, other=0.0).to(tl.float32)
    d = tl.load(d_out + place, mask=ok, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    dtype = d_out.dtype.element_ty
    tl.store(d_gate + place, (d * b * s * (1.0 + a * (1.0 - s))).to(dtype), mask=ok)
    tl.store(d_up + place, (d * a * s).to(dtype), mask=ok)
    tl.store(d_out + place, _product(a, b, s, dtype).to(dtype), mask=ok)
