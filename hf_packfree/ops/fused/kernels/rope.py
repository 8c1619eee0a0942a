"""Triton kernels of the rotary embedding of q and k beside v: one pass each way, fp32 inside, one rounding.

A program works on all heads of a token, whose angles are read once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _turn(source, target, c, s, h, d, other, mask, SIZE: tl.constexpr):
    """target [HEADS, SIZE] = source turned: each channel by c, its partner by s."""
    a = tl.load(source + h * SIZE + d, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + h * SIZE + other, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + h * SIZE + d, (a * c + b * s).to(target.dtype.element_ty), mask=mask)


@triton.jit
def _angles(cos, sin, t, d, SIZE: tl.constexpr):
    """Cosine and signed sine of token t: by what each channel, and its partner, is turned."""
    c = tl.load(cos + t * SIZE + d, mask=d < SIZE, other=0.0).to(tl.float32)
    s = tl.load(sin + t * SIZE + d, mask=d < SIZE, other=0.0).to(tl.float32)
    return c, tl.where(d < SIZE // 2, -s, s)


@triton.jit
def qkv_rope(
    qkv, cos, sin, q, k, v, HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """q, k, v [T, HEADS, SIZE] from qkv [T, 3, HEADS, SIZE].  Grid: T."""
    t = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    mask, other = (h < HEADS) & (d < SIZE), tl.where(d < SIZE // 2, d + SIZE // 2, d - SIZE // 2)
    c, s = _angles(cos, sin, t, d, SIZE)
    row, out = qkv + 3 * t * HEADS * SIZE, t * HEADS * SIZE
    _turn(row, q + out, c, s, h, d, other, mask, SIZE)
    _turn(row + HEADS * SIZE, k + out, c, s, h, d, other, mask, SIZE)
    at = h * SIZE + d
    tl.store(v + out + at, tl.load(row + 2 * HEADS * SIZE + at, mask=mask), mask=mask)


@triton.jit
def qkv_rope_backward(
    d_q, d_k, d_v, cos, sin, d_qkv, HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """d_qkv [T, 3, HEADS, SIZE]: turned back, by the opposite angles.  Grid: T."""
    t = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    mask, other = (h < HEADS) & (d < SIZE), tl.where(d < SIZE // 2, d + SIZE // 2, d - SIZE // 2)
    c, s = _angles(cos, sin, t, d, SIZE)
    row, grad = d_qkv + 3 * t * HEADS * SIZE, t * HEADS * SIZE
    _turn(d_q + grad, row, c, -s, h, d, other, mask, SIZE)
    _turn(d_k + grad, row + HEADS * SIZE, c, -s, h, d, other, mask, SIZE)
    at = h * SIZE + d
    tl.store(row + 2 * HEADS * SIZE + at, tl.load(d_v + grad + at, mask=mask), mask=mask)
