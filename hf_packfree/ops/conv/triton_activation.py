"""The activation and the L2 norms of q's and k's heads, which the convolution's Triton kernels
apply to its output.

Shapes: H heads of D channels that one program works on.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

_PTX = tl.constexpr(torch.version.hip is None and os.environ.get("TRITON_INTERPRET") != "1")
"""Whether inline PTX can be used: not on AMD's GPUs, nor in Triton's interpreter."""


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); flushes denormals, unlike Triton's own: 1 + e loses them anyway."""
    if _PTX:
        e = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;",
            "=f,f",
            [x * -1.4426950408889634],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + e], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.sigmoid(x)


@triton.jit
def _activate(u, b, eps, BIAS: tl.constexpr, SILU: tl.constexpr, QK_L2NORM: tl.constexpr):
    """Activated channels [H, D] of one token from the convolution's u; QK_L2NORM: divided by each
    head's L2 norm.
    """
    if BIAS:
        u = u + b
    if SILU:
        u = u * sigmoid(u)
    if QK_L2NORM:
        u = u * tl.rsqrt(tl.sum(u * u, 1) + eps)[:, None]
    return u


@triton.jit
def _activate4(
    u0, u1, u2, u3, b, eps, BIAS: tl.constexpr, SILU: tl.constexpr, QK_L2NORM: tl.constexpr
):
    return (
        _activate(u0, b, eps, BIAS, SILU, QK_L2NORM),
        _activate(u1, b, eps, BIAS, SILU, QK_L2NORM),
        _activate(u2, b, eps, BIAS, SILU, QK_L2NORM),
        _activate(u3, b, eps, BIAS, SILU, QK_L2NORM),
    )


@triton.jit
def activate4(
    u0, u1, u2, u3, b, eps, is_qk, BIAS: tl.constexpr, SILU: tl.constexpr, QK_L2NORM: tl.constexpr
):
    """`_activate` of four tokens; `is_qk`: whether this program's heads are of q or k, which
    QK_L2NORM divides by their norms.
    """
    if QK_L2NORM:
        if is_qk:
            u0, u1, u2, u3 = _activate4(u0, u1, u2, u3, b, eps, BIAS, SILU, True)
        else:
            u0, u1, u2, u3 = _activate4(u0, u1, u2, u3, b, eps, BIAS, SILU, False)
    else:
        u0, u1, u2, u3 = _activate4(u0, u1, u2, u3, b, eps, BIAS, SILU, False)
    return u0, u1, u2, u3


@triton.jit
def _activate_backward(
    u, g, b, eps, BIAS: tl.constexpr, SILU: tl.constexpr, QK_L2NORM: tl.constexpr
):
    """The gradient of u [H, D] from the gradient g of `_activate`'s result."""
    if BIAS:
        u = u + b
    gate = sigmoid(u)
    y = u * gate if SILU else u
    if QK_L2NORM:
        scale = tl.rsqrt(tl.sum(y * y, 1) + eps)
        g = g * scale[:, None] - y * (scale * scale * scale * tl.sum(y * g, 1))[:, None]
    if SILU:
        g = g * (gate + (y - y * gate))
    return g


@triton.jit
def _activate4_backward(
    u0,
    u1,
    u2,
    u3,
    g0,
    g1,
    g2,
    g3,
    b,
    eps,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    QK_L2NORM: tl.constexpr,
):
    return (
        _activate_backward(u0, g0, b, eps, BIAS, SILU, QK_L2NORM),
        _activate_backward(u1, g1, b, eps, BIAS, SILU, QK_L2NORM),
        _activate_backward(u2, g2, b, eps, BIAS, SILU, QK_L2NORM),
        _activate_backward(u3, g3, b, eps, BIAS, SILU, QK_L2NORM),
    )


@triton.jit
def activate4_backward(
    u0,
    u1,
    u2,
    u3,
    g0,
    g1,
    g2,
    g3,
    b,
    eps,
    is_qk,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    QK_L2NORM: tl.constexpr,
):
    """The gradients of u0 to u3 from g0 to g3, the gradients of `activate4`'s results."""
    if QK_L2NORM:
        if is_qk:
            g0, g1, g2, g3 = _activate4_backward(
                u0, u1, u2, u3, g0, g1, g2, g3, b, eps, BIAS, SILU, True
            )
        else:
            g0, g1, g2, g3 = _activate4_backward(
                u0, u1, u2, u3, g0, g1, g2, g3, b, eps, BIAS, SILU, False
            )
    else:
        g0, g1, g2, g3 = _activate4_backward(
            u0, u1, u2, u3, g0, g1, g2, g3, b, eps, BIAS, SILU, False
        )
    return g0, g1, g2, g3
