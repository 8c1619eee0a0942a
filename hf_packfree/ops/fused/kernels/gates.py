"""Triton kernels of the delta rule's gates and of the output gate: one pass each way, fp32
inside.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _softplus(t):
    """log(1 + exp(t)) = max(t, 0) + log(1 + e) with e = exp(-|t|), accurate to fp32 where e is far
    below one, too.

    log(1 + e) = 2 artanh(s) with s = e / (2 + e), at most 1/3; the series ends below fp32's
    rounding.
    """
    e = tl.exp(-tl.abs(t))
    s = e / (2.0 + e)
    q = s * s
    series = 1.0 + q * (
        1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13)))))
    )
    return tl.maximum(t, 0.0) + 2.0 * s * series


@triton.jit
def _block(tokens, heads, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Tokens and heads of this program's block, and its mask."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    h = tl.arange(0, WIDTH)[None, :]
    return t, h, (t < tokens) & (h < heads)


@triton.jit(do_not_specialize=["tokens"])
def gates(
    a,
    b,
    A_log,
    dt_bias,
    g,
    beta,
    tokens,
    heads,
    a_token,
    a_head,
    b_token,
    b_head,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """g [T, HV] fp32 = -exp(A_log) * softplus(a + dt_bias), beta [T, HV] = sigmoid(b). Grid:
    blocks of ROWS tokens.
    """
    t, h, mask = _block(tokens, heads, ROWS, WIDTH)
    neg_A = -tl.exp(tl.load(A_log + h, mask=h < heads, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + h, mask=h < heads, other=0.0).to(tl.float32)
    x = tl.load(a + t * a_token + h * a_head, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(b + t * b_token + h * b_head, mask=mask, other=0.0).to(tl.float32)
    offset = t * heads + h
    tl.store(g + offset, neg_A * _softplus(x + bias), mask=mask)
    tl.store(beta + offset, tl.sigmoid(y).to(beta.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def gates_backward(
    a,
    b,
    A_log,
    dt_bias,
    d_g,
    d_beta,
    d_a,
    d_b,
    d_shared,
    tokens,
    heads,
    a_token,
    a_head,
    b_token,
    b_head,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """d_a, d_b [T, HV], and per program the gradients of A_log and dt_bias: d_shared [programs,
    2, HV] fp32, unless None.
    """
    t, h, mask = _block(tokens, heads, ROWS, WIDTH)
    neg_A = -tl.exp(tl.load(A_log + h, mask=h < heads, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + h, mask=h < heads, other=0.0).to(tl.float32)
    x = tl.load(a + t * a_token + h * a_head, mask=mask, other=0.0).to(tl.float32) + bias
    s = tl.sigmoid(tl.load(b + t * b_token + h * b_head, mask=mask, other=0.0).to(tl.float32))
    offset = t * heads + h
    # 0 outside the mask
    dg_scaled = tl.load(d_g + offset, mask=mask, other=0.0).to(tl.float32) * neg_A
    d_x = dg_scaled * tl.sigmoid(x)
    d_y = tl.load(d_beta + offset, mask=mask, other=0.0).to(tl.float32) * s * (1.0 - s)
    tl.store(d_a + offset, d_x.to(d_a.dtype.element_ty), mask=mask)
    tl.store(d_b + offset, d_y.to(d_b.dtype.element_ty), mask=mask)
    if d_shared is not None:
        partial = d_shared + tl.program_id(0) * 2 * heads + h
        tl.store(partial, tl.sum(dg_scaled * _softplus(x), 0)[None, :], mask=h < heads)
        tl.store(partial + heads, tl.sum(d_x, 0)[None, :], mask=h < heads)


@triton.jit
def _offsets(
    tokens, heads, size, token_stride, head_stride, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """Offsets of each (token, head) row in x and in z, and the mask."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    mask = (row < tokens * heads) & (d < size)
    return row * size + d, row // heads * token_stride + row % heads * head_stride + d, mask


@triton.jit(do_not_specialize=["tokens"])
def output_gate(
    x,
    z,
    out,
    tokens,
    heads,
    size,
    token_stride,
    head_stride,
    out_stride,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """out [T, H, D], tokens `out_stride` elements apart, = x * sigmoid(z). Grid: blocks of ROWS
    (token, head) pairs.
    """
    offset, z_offset, mask = _offsets(tokens, heads, size, token_stride, head_stride, ROWS, WIDTH)
    a = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(z + z_offset, mask=mask, other=0.0).to(tl.float32)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    place = offset + row // heads * (out_stride - heads * size)
    tl.store(out + place, (a * tl.sigmoid(b)).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def output_gate_backward(
    x,
    z,
    d_out,
    gated,
    d_x,
    d_z,
    tokens,
    heads,
    size,
    token_stride,
    head_stride,
    RECOMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """d_x, d_z [T, H, D]; where RECOMPUTE, `gated` gets the product, which the gradient of a
    projection's weight needs.
    """
    offset, z_offset, mask = _offsets(tokens, heads, size, token_stride, head_stride, ROWS, WIDTH)
    a = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(tl.load(z + z_offset, mask=mask, other=0.0).to(tl.float32))
    g = tl.load(d_out + offset, mask=mask, other=0.0).to(tl.float32)
    if RECOMPUTE:
        tl.store(gated + offset, (a * s).to(gated.dtype.element_ty), mask=mask)
    tl.store(d_x + offset, (g * s).to(d_x.dtype.element_ty), mask=mask)
    tl.store(d_z + offset, (g * a * s * (1.0 - s)).to(d_z.dtype.element_ty), mask=mask)
