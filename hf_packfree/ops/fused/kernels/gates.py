"""Triton kernels of the delta rule's gates: one pass each way, fp32 inside."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _softplus(t):
    """log(1 + exp(t)) = max(t, 0) + log(1 + e) with e = exp(-|t|), accurate to fp32 where e is far below one, too.

    log(1 + e) = 2 artanh(s) with s = e / (2 + e), at most 1/3; the series ends below fp32's rounding.
    """
    e = tl.exp(-tl.abs(t))
    s = e / (2.0 + e)
    q = s * s
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13))))))
    return tl.maximum(t, 0.0) + 2.0 * s * series


@triton.jit
def _block(tokens, heads, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Tokens and heads of this program's block, and its mask."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    h = tl.arange(0, WIDTH)[None, :]
    return t, h, (t < tokens) & (h < heads)


@triton.jit(do_not_specialize=["tokens"])
def gates(
    a, b, A_log, dt_bias, g, beta, tokens, heads, a_token, a_head, b_token, b_head,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):
    """g [T, HV] fp32 = -exp(A_log) * softplus(a + dt_bias), beta [T, HV] = sigmoid(b).  Grid: blocks of ROWS tokens."""
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
    a, b, A_log, dt_bias, d_g, d_beta, d_a, d_b, d_shared, tokens, heads, a_token, a_head, b_token, b_head,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):
    """d_a, d_b [T, HV], and per program the gradients of A_log and dt_bias: d_shared [programs, 2, HV] fp32, unless None."""
    t, h, mask = _block(tokens, heads, ROWS, WIDTH)
    neg_A = -tl.exp(tl.load(A_log + h, mask=h < heads, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + h, mask=h < heads, other=0.0).to(tl.float32)
    x = tl.load(a + t * a_token + h * a_head, mask=mask, other=0.0).to(tl.float32) + bias
    s = tl.sigmoid(tl.load(b + t * b_token + h * b_head, mask=mask, other=0.0).to(tl.float32))
    offset = t * heads + h
    dg_scaled = tl.load(d_g + offset, mask=mask, other=0.0).to(tl.float32) * neg_A  # 0 outside the mask
    d_x = dg_scaled * tl.sigmoid(x)
    d_y = tl.load(d_beta + offset, mask=mask, other=0.0).to(tl.float32) * s * (1.0 - s)
    tl.store(d_a + offset, d_x.to(d_a.dtype.element_ty), mask=mask)
    tl.store(d_b + offset, d_y.to(d_b.dtype.element_ty), mask=mask)
    if d_shared is not None:
        partial = d_shared + tl.program_id(0) * 2 * heads + h
        tl.store(partial, tl.sum(dg_scaled * _softplus(x), 0)[None, :], mask=h < heads)
        tl.store(partial + heads, tl.sum(d_x, 0)[None, :], mask=h < heads)
