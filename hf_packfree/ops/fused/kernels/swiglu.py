"""Triton kernels of the gated product, without and with low-rank adapters of its factors: one pass each way, fp32 inside.

What an adapter adds to a layer of F outputs is a product of small depth K, of h [T, K] and w [K, F]: it is added where the
factor is read, and never written.
"""

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
def swiglu(gate, up, out, tokens, width, BLOCK: tl.constexpr):
    """out [T, F] = silu(gate) * up.  Grid: blocks of BLOCK elements."""
    offset, mask = _offsets(tokens, width, BLOCK)
    a = tl.load(gate + offset, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(up + offset, mask=mask, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    tl.store(out + offset, _product(a, b, tl.sigmoid(a), dtype).to(dtype), mask=mask)


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


@triton.jit
def _low_rank(h, w, stride, row, column, tokens, width, rank, DEPTH: tl.constexpr):
    """Rows and columns of h w in fp32: h [tokens, rank] with this stride, w [rank, width]."""
    k = tl.arange(0, DEPTH)
    place = h + row[:, None].to(tl.int64) * stride + k[None, :]
    left = tl.load(place, mask=(row[:, None] < tokens) & (k[None, :] < rank), other=0.0)
    right = tl.load(w + k[:, None] * width + column[None, :], mask=(k[:, None] < rank) & (column[None, :] < width), other=0.0)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _factor(x, h, w, stride, offset, mask, row, column, tokens, width, rank, DEPTH: tl.constexpr):
    """A layer's output with what its adapters add, rounded as by torch, which stores it."""
    a = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    if h is not None:
        a += _low_rank(h, w, stride, row, column, tokens, width, rank, DEPTH)
    return a.to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _tile(tokens, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows, columns, offsets and mask of the program's tile; neighbours share rows."""
    blocks = tl.cdiv(width, COLUMNS)
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    offset = row[:, None].to(tl.int64) * width + column[None, :]
    return row, column, offset, (row[:, None] < tokens) & (column[None, :] < width)


@triton.jit(do_not_specialize=["tokens"])
def adapted_swiglu(
    gate, up, out, gate_h, gate_w, up_h, up_w, tokens, width, gate_stride, gate_rank, up_stride, up_rank,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATE_DEPTH: tl.constexpr, UP_DEPTH: tl.constexpr,
):
    """out [T, F] = silu(gate + gate_h gate_w) * (up + up_h up_w).  Grid: tiles."""
    row, column, offset, mask = _tile(tokens, width, ROWS, COLUMNS)
    a = _factor(gate, gate_h, gate_w, gate_stride, offset, mask, row, column, tokens, width, gate_rank, GATE_DEPTH)
    b = _factor(up, up_h, up_w, up_stride, offset, mask, row, column, tokens, width, up_rank, UP_DEPTH)
    dtype = out.dtype.element_ty
    tl.store(out + offset, ((a * tl.sigmoid(a)).to(dtype).to(tl.float32) * b).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def adapted_swiglu_backward(
    gate, up, d_out, d_gate, d_up, gate_h, gate_w, up_h, up_w, out_h, out_w,
    tokens, width, gate_stride, gate_rank, up_stride, up_rank, out_stride, out_rank,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATE_DEPTH: tl.constexpr, UP_DEPTH: tl.constexpr, OUT_DEPTH: tl.constexpr,
):
    """d_gate, d_up [T, F] from d_out + out_h out_w; the gated product overwrites `d_out` [T, F].  Grid: tiles."""
    row, column, offset, mask = _tile(tokens, width, ROWS, COLUMNS)
    a = _factor(gate, gate_h, gate_w, gate_stride, offset, mask, row, column, tokens, width, gate_rank, GATE_DEPTH)
    b = _factor(up, up_h, up_w, up_stride, offset, mask, row, column, tokens, width, up_rank, UP_DEPTH)
    d = _factor(d_out, out_h, out_w, out_stride, offset, mask, row, column, tokens, width, out_rank, OUT_DEPTH)
    s = tl.sigmoid(a)
    dtype = d_out.dtype.element_ty
    tl.store(d_gate + offset, (d * b * s * (1.0 + a * (1.0 - s))).to(dtype), mask=mask)
    tl.store(d_up + offset, (d * a * s).to(dtype), mask=mask)
    tl.store(d_out + offset, ((a * s).to(dtype).to(tl.float32) * b).to(dtype), mask=mask)
