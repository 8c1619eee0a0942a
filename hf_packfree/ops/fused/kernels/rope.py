"""Triton kernels of rotary embeddings, after an RMS norm or without one: one pass each way, fp32
inside, one rounding.

With the norm, a program is one warp and works on one head at a time, so that sums over channels
stay in the warp. Without, it works on all heads of a token. Both read a token's angles once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rotated_with(d, half):
    """The channel that d is rotated with: d + half below half, d - half from there to 2 half;
    itself above.
    """
    return tl.where(d < half, d + half, tl.where(d < 2 * half, d - half, d))


@triton.jit
def norm_rope(
    x,
    weight,
    cos,
    sin,
    out,
    size,
    half,
    token_stride,
    head_stride,
    angle_stride,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """out [T, H, D] = rotate(x / rms(x) * (1 + weight)).  Grid: T."""
    t, d = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    mask, is_rotary, other = d < size, d < 2 * half, _rotated_with(d, half)
    # of heads that lie apart, beyond int32
    head_stride = tl.cast(head_stride, tl.int64)
    w = 1.0 + tl.load(weight + d, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + t * angle_stride + d, mask=is_rotary, other=1.0).to(tl.float32) * w
    s = tl.load(sin + t * angle_stride + d, mask=is_rotary, other=0.0).to(tl.float32)
    s *= 1.0 + tl.load(weight + other, mask=is_rotary, other=0.0).to(tl.float32)
    s = tl.where(d < half, -s, s)
    for h in range(HEADS):
        head = x + t * token_stride + h * head_stride
        a = tl.load(head + d, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(head + other, mask=is_rotary, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(a * a, 0) / size + eps)
        tl.store(
            out + (t * HEADS + h) * size + d,
            ((a * c + b * s) * rstd).to(out.dtype.element_ty),
            mask=mask,
        )


@triton.jit(do_not_specialize=["tokens", "tokens_per_program"])
def norm_rope_backward(
    x,
    weight,
    cos,
    sin,
    d_out,
    d_x,
    d_weight,
    tokens,
    size,
    half,
    token_stride,
    head_stride,
    angle_stride,
    eps,
    tokens_per_program,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """d_x [T, H, D], and per program d_weight [programs, D] unless None."""
    d = tl.arange(0, WIDTH)
    mask, is_rotary, other = d < size, d < 2 * half, _rotated_with(d, half)
    # of heads that lie apart, beyond int32
    head_stride = tl.cast(head_stride, tl.int64)
    w = 1.0 + tl.load(weight + d, mask=mask, other=0.0).to(tl.float32)
    acc = tl.zeros([WIDTH], dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * tokens_per_program
    for t in range(first, tl.minimum(first + tokens_per_program, tokens)):
        c = tl.load(cos + t * angle_stride + d, mask=is_rotary, other=1.0).to(tl.float32)
        s = tl.load(sin + t * angle_stride + other, mask=is_rotary, other=0.0).to(tl.float32)
        s = tl.where(d < half, s, -s)
        for h in range(HEADS):
            offset = (t * HEADS + h) * size
            a = tl.load(x + t * token_stride + h * head_stride + d, mask=mask, other=0.0).to(
                tl.float32
            )
            g = tl.load(d_out + offset + d, mask=mask, other=0.0).to(tl.float32) * c
            g += tl.load(d_out + offset + other, mask=is_rotary, other=0.0).to(tl.float32) * s
            rstd = tl.rsqrt(tl.sum(a * a, 0) / size + eps)
            a *= rstd
            acc += g * a
            g *= w
            g = rstd * (g - a * (tl.sum(a * g, 0) / size))
            tl.store(d_x + offset + d, g.to(d_x.dtype.element_ty), mask=mask)
    if d_weight is not None:
        tl.store(d_weight + tl.program_id(0) * size + d, acc, mask=mask)


@triton.jit
def rope(
    x,
    cos,
    sin,
    out,
    half,
    token_stride,
    head_stride,
    angle_stride,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """out [T, HEADS, SIZE] = rotate(x), or its transpose, for gradients.  Grid: T."""
    t = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    mask, is_rotary, other = (h < HEADS) & (d < SIZE), d < 2 * half, _rotated_with(d, half)
    c = tl.load(cos + t * angle_stride + d, mask=is_rotary, other=1.0).to(tl.float32)
    turn = other if BACKWARD else d
    s = tl.load(sin + t * angle_stride + turn, mask=is_rotary, other=0.0).to(tl.float32)
    s = tl.where((d < half) != BACKWARD, -s, s)
    heads = x + t * token_stride + h.to(tl.int64) * head_stride
    a = tl.load(heads + d, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(heads + other, mask=mask & is_rotary, other=0.0).to(tl.float32)
    y = (a * c + b * s).to(out.dtype.element_ty)
    tl.store(out + (t * HEADS + h) * SIZE + d, y, mask=mask)


@triton.jit
def _rotate(source, target, c, s, h, d, other, mask, SIZE: tl.constexpr):
    """target [HEADS, SIZE] = source rotated: each channel by c, its partner by s."""
    a = tl.load(source + h * SIZE + d, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + h * SIZE + other, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + h * SIZE + d, (a * c + b * s).to(target.dtype.element_ty), mask=mask)


@triton.jit
def _angles(cos, sin, t, d, SIZE: tl.constexpr):
    """Cosine and signed sine of token t for each channel: the factors of the channel and of its
    partner.
    """
    c = tl.load(cos + t * SIZE + d, mask=d < SIZE, other=0.0).to(tl.float32)
    s = tl.load(sin + t * SIZE + d, mask=d < SIZE, other=0.0).to(tl.float32)
    return c, tl.where(d < SIZE // 2, -s, s)


@triton.jit
def qkv_rope(
    qkv,
    cos,
    sin,
    q,
    k,
    v,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """q, k, v [T, HEADS, SIZE] from qkv [T, 3, HEADS, SIZE].  Grid: T."""
    t = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    mask, other = (h < HEADS) & (d < SIZE), tl.where(d < SIZE // 2, d + SIZE // 2, d - SIZE // 2)
    c, s = _angles(cos, sin, t, d, SIZE)
    row, out = qkv + 3 * t * HEADS * SIZE, t * HEADS * SIZE
    _rotate(row, q + out, c, s, h, d, other, mask, SIZE)
    _rotate(row + HEADS * SIZE, k + out, c, s, h, d, other, mask, SIZE)
    at = h * SIZE + d
    tl.store(v + out + at, tl.load(row + 2 * HEADS * SIZE + at, mask=mask), mask=mask)


@triton.jit
def qkv_rope_backward(
    d_q,
    d_k,
    d_v,
    cos,
    sin,
    d_qkv,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """d_qkv [T, 3, HEADS, SIZE]: rotated back, by the opposite angles.  Grid: T."""
    t = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    mask, other = (h < HEADS) & (d < SIZE), tl.where(d < SIZE // 2, d + SIZE // 2, d - SIZE // 2)
    c, s = _angles(cos, sin, t, d, SIZE)
    row, grad = d_qkv + 3 * t * HEADS * SIZE, t * HEADS * SIZE
    _rotate(d_q + grad, row, c, -s, h, d, other, mask, SIZE)
    _rotate(d_k + grad, row + HEADS * SIZE, c, -s, h, d, other, mask, SIZE)
    at = h * SIZE + d
    tl.store(row + 2 * HEADS * SIZE + at, tl.load(d_v + grad + at, mask=mask), mask=mask)
