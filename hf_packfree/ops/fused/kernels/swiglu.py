"""Triton kernels of the gated product: one pass each way, fp32 inside. Grid: blocks of BLOCK
columns, of every row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place(width, BLOCK: tl.constexpr):
    """The program's row of [T, F], its columns, and their mask."""
    blocks = tl.cdiv(width, BLOCK)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    return (tl.program_id(0) // blocks).to(tl.int64), column, column < width


@triton.jit
def _product(a, b, s, dtype):
    """silu(a) * b; both factors are rounded to `dtype`, as by torch, which stores the first."""
    return (a * s).to(dtype).to(tl.float32) * b


@triton.jit
def swiglu(gate, up, out, out_stride, width, BLOCK: tl.constexpr):
    """out [T, F] = silu(gate) * up, rows of `out_stride` elements."""
    row, column, mask = _place(width, BLOCK)
    offset = row * width + column
    a = tl.load(gate + offset, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(up + offset, mask=mask, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    tl.store(
        out + row * out_stride + column, _product(a, b, tl.sigmoid(a), dtype).to(dtype), mask=mask
    )


@triton.jit
def swiglu_backward(gate, up, d_out, d_inputs, width, BLOCK: tl.constexpr):
    """d_inputs [T, 2 F], of gate and up; the product overwrites `d_out` [T, F], for the gradient
    of a projection's weight.
    """
    row, column, mask = _place(width, BLOCK)
    offset = row * width + column
    a = tl.load(gate + offset, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(up + offset, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(d_out + offset, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    dtype = d_out.dtype.element_ty
    d_gate = d_inputs + row * 2 * width + column
    tl.store(d_gate, (d * b * s * (1.0 + a * (1.0 - s))).to(dtype), mask=mask)
    tl.store(d_gate + width, (d * a * s).to(dtype), mask=mask)
    tl.store(d_out + offset, _product(a, b, s, dtype).to(dtype), mask=mask)
