"""The parts of the convolution's two Triton kernels: loads and stores within the row, masks at
documents' edges.

Shapes: T tokens, C channels, H heads of D channels that one program works on.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def heads_of_program(q, k, v, keys, values, size, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """The heads of q, k or v that this program works on.

    Returns their tensor, whether that is q or k, its channels per token, the heads' offsets within
    a token of it and within a token of the row, and the mask.
    """
    block, blocks = tl.program_id(1), tl.cdiv(keys, BLOCK_H)
    if block < blocks:
        tensor, before, heads, first = q, 0, keys, block * BLOCK_H
    elif block < 2 * blocks:
        tensor, before, heads, first = k, keys, keys, (block - blocks) * BLOCK_H
    else:
        tensor, before, heads, first = v, 2 * keys, values, (block - 2 * blocks) * BLOCK_H
    h, d = first + tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    mask = (h < heads) & (d < size)
    return tensor, block < 2 * blocks, heads * size, h * size + d, (before + h) * size + d, mask


@triton.jit
def load_tap(weight, channel, mask, back: tl.constexpr, TAPS: tl.constexpr):
    """Weights [C, TAPS]: the tap of the token `back` positions before."""
    return tl.load(
        weight + channel * TAPS + (TAPS - 1 - back), mask=mask & (back < TAPS), other=0.0
    ).to(tl.float32)


@triton.jit
def load_taps(weight, bias, channel, mask, TAPS: tl.constexpr, BIAS: tl.constexpr):
    """The four taps, newest first, zero beyond TAPS, and the bias."""
    b = tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32) if BIAS else 0.0
    return (
        load_tap(weight, channel, mask, 0, TAPS),
        load_tap(weight, channel, mask, 1, TAPS),
        load_tap(weight, channel, mask, 2, TAPS),
        load_tap(weight, channel, mask, 3, TAPS),
        b,
    )


@triton.jit
def store_tap(d_weight, channel, mask, back: tl.constexpr, TAPS: tl.constexpr, value):
    tl.store(d_weight + channel * TAPS + (TAPS - 1 - back), value, mask=mask & (back < TAPS))


@triton.jit
def _as_mask(mask):
    """The mask as bool: Triton's interpreter keeps a block combined with a scalar condition as
    int32.
    """
    return mask != 0


@triton.jit
def in_bounds(mask, t, tokens):
    return _as_mask(mask & (t >= 0) & (t < tokens))


@triton.jit
def load4(x, stride, offset, mask, t, tokens):
    """The channels of token t and the three before it, the latest first; zero outside the row."""
    # one multiplication for four consecutive tokens
    start = x + (t - 3).to(tl.int64) * stride
    return (
        tl.load(start + 3 * stride + offset, mask=in_bounds(mask, t, tokens), other=0.0),
        tl.load(start + 2 * stride + offset, mask=in_bounds(mask, t - 1, tokens), other=0.0),
        tl.load(start + stride + offset, mask=in_bounds(mask, t - 2, tokens), other=0.0),
        tl.load(start + offset, mask=in_bounds(mask, t - 3, tokens), other=0.0),
    )


@triton.jit
def store4(out, stride, offset, mask, t, tokens, y0, y1, y2, y3):
    """Store channels of token t (y0) and the three before it (y1 to y3); t - 3 is at least 0."""
    start = out + (t - 3).to(tl.int64) * stride
    dtype = out.dtype.element_ty
    tl.store(start + 3 * stride + offset, y0.to(dtype), mask=_as_mask(mask & (t < tokens)))
    tl.store(start + 2 * stride + offset, y1.to(dtype), mask=_as_mask(mask & (t - 1 < tokens)))
    tl.store(start + stride + offset, y2.to(dtype), mask=_as_mask(mask & (t - 2 < tokens)))
    tl.store(start + offset, y3.to(dtype), mask=_as_mask(mask & (t - 3 < tokens)))


@triton.jit
def is_interior(interior, t, tokens):
    """Whether token t and the three before it are in one document with all the tokens that their
    taps read.
    """
    return tl.load(interior + t // 4, mask=(t >= 3) & (t < tokens), other=0) > 0


@triton.jit
def load4_if(interior, x, stride, offset, mask, t, tokens):
    """`load4`; without bounds checks where `interior` says that all tokens are in the row."""
    if interior:
        start = x + (t - 3).to(tl.int64) * stride
        x0 = tl.load(start + 3 * stride + offset, mask=mask, other=0.0)
        x1 = tl.load(start + 2 * stride + offset, mask=mask, other=0.0)
        x2 = tl.load(start + stride + offset, mask=mask, other=0.0)
        x3 = tl.load(start + offset, mask=mask, other=0.0)
    else:
        x0, x1, x2, x3 = load4(x, stride, offset, mask, t, tokens)
    return x0, x1, x2, x3


@triton.jit
def store4_if(interior, out, stride, offset, mask, t, tokens, y0, y1, y2, y3):
    """`store4`; without bounds checks where `interior`."""
    if interior:
        start = out + (t - 3).to(tl.int64) * stride
        dtype = out.dtype.element_ty
        tl.store(start + offset, y3.to(dtype), mask=mask)
        tl.store(start + stride + offset, y2.to(dtype), mask=mask)
        tl.store(start + 2 * stride + offset, y1.to(dtype), mask=mask)
        tl.store(start + 3 * stride + offset, y0.to(dtype), mask=mask)
    else:
        store4(out, stride, offset, mask, t, tokens, y0, y1, y2, y3)


@triton.jit
def widen4(x0, x1, x2, x3):
    return x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)


@triton.jit
def load_pos(pos_in_seq, t, tokens):
    """The position of token t in its document; past the row 3, which masks no tap: tokens there are
    zero anyway.
    """
    return tl.load(pos_in_seq + t, mask=t < tokens, other=3)


@triton.jit
def load_pos4(pos_in_seq, t, tokens):
    """Positions of token t and the three before it, the latest first."""
    return (
        load_pos(pos_in_seq, t, tokens),
        load_pos(pos_in_seq, t - 1, tokens),
        load_pos(pos_in_seq, t - 2, tokens),
        load_pos(pos_in_seq, t - 3, tokens),
    )


@triton.jit
def mask_tap(x, pos, back: tl.constexpr, MASKED: tl.constexpr):
    """x if the token `back` positions before the one at position `pos` is of the same document,
    else zero.
    """
    if MASKED:
        x = tl.where(pos >= back, x, 0.0)
    return x


@triton.jit
def conv1(x0, x1, x2, x3, pos, w0, w1, w2, w3, MASKED: tl.constexpr):
    """The convolution at a token: x0 its channels, x1 to x3 those of the tokens before it."""
    return (
        x0 * w0
        + mask_tap(x1, pos, 1, MASKED) * w1
        + mask_tap(x2, pos, 2, MASKED) * w2
        + mask_tap(x3, pos, 3, MASKED) * w3
    )


@triton.jit
def conv4(x0, x1, x2, x3, x4, x5, x6, p0, p1, p2, p3, w0, w1, w2, w3, MASKED: tl.constexpr):
    """The convolution at four tokens, the latest first, whose positions are p0 to p3."""
    return (
        conv1(x0, x1, x2, x3, p0, w0, w1, w2, w3, MASKED),
        conv1(x1, x2, x3, x4, p1, w0, w1, w2, w3, MASKED),
        conv1(x2, x3, x4, x5, p2, w0, w1, w2, w3, MASKED),
        conv1(x3, x4, x5, x6, p3, w0, w1, w2, w3, MASKED),
    )


@triton.jit
def conv_dx(g0, g1, g2, g3, p0, p1, p2, p3, w1, w2, w3, MASKED: tl.constexpr):
    """The parts of x's gradient that the gradients of four tokens, the latest first, give through
    all taps but the newest.

    Returns the parts of the second, third and fourth of the four, then of the three tokens before
    them.
    """
    return (
        mask_tap(g0, p0, 1, MASKED) * w1,
        mask_tap(g1, p1, 1, MASKED) * w1 + mask_tap(g0, p0, 2, MASKED) * w2,
        mask_tap(g2, p2, 1, MASKED) * w1
        + mask_tap(g1, p1, 2, MASKED) * w2
        + mask_tap(g0, p0, 3, MASKED) * w3,
        mask_tap(g3, p3, 1, MASKED) * w1
        + mask_tap(g2, p2, 2, MASKED) * w2
        + mask_tap(g1, p1, 3, MASKED) * w3,
        mask_tap(g3, p3, 2, MASKED) * w2 + mask_tap(g2, p2, 3, MASKED) * w3,
        mask_tap(g3, p3, 3, MASKED) * w3,
    )


@triton.jit
def _conv_dw1(
    g0, g1, g2, g3, x0, x1, x2, x3, p0, p1, p2, p3, back: tl.constexpr, MASKED: tl.constexpr
):
    """The gradient of one tap from the gradients of four tokens and the tokens that the tap
    multiplied.
    """
    d_tap = g0 * mask_tap(x0, p0, back, MASKED) + g1 * mask_tap(x1, p1, back, MASKED)
    return d_tap + g2 * mask_tap(x2, p2, back, MASKED) + g3 * mask_tap(x3, p3, back, MASKED)


@triton.jit
def conv_dw(g0, g1, g2, g3, x0, x1, x2, x3, x4, x5, x6, p0, p1, p2, p3, MASKED: tl.constexpr):
    """The gradients of the four taps, newest first."""
    return (
        _conv_dw1(g0, g1, g2, g3, x0, x1, x2, x3, p0, p1, p2, p3, 0, False),
        _conv_dw1(g0, g1, g2, g3, x1, x2, x3, x4, p0, p1, p2, p3, 1, MASKED),
        _conv_dw1(g0, g1, g2, g3, x2, x3, x4, x5, p0, p1, p2, p3, 2, MASKED),
        _conv_dw1(g0, g1, g2, g3, x3, x4, x5, x6, p0, p1, p2, p3, 3, MASKED),
    )
