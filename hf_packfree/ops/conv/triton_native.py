"""The causal convolution on our Triton kernels: channels stay last and nothing is copied.

Given the heads, it also splits q, k and v into tensors of their own and divides q and k by their L2 norms, which would
otherwise be three more passes over the row.  Launch sizes are fixed: nothing is tuned at run time, and a document's
bits do not depend on its row.

Shapes: T tokens, C channels, W taps, S strips.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_packfree.ops.backend import Site, block_width, needs_triton
from hf_packfree.packing import PackedSequence

_TAPS = 4
_STRIP, _CHANNELS, _WARPS = 128, 512, 4  # tokens, channels and warps of one program


class Part(NamedTuple):
    """`heads` heads of `size` channels from channel `first` on; `unit`: divide each by its L2 norm."""

    first: int
    heads: int
    size: int
    unit: bool

    @property
    def channels(self) -> slice:
        """Its channels in the row."""
        return slice(self.first, self.first + self.heads * self.size)


def unusable(site: Site) -> str | None:
    """Return why these kernels cannot run at `site`, or None."""
    if site.sizes.get("taps", 1) > _TAPS:
        return f"it has {_TAPS} taps at most, the model {site.sizes['taps']}"
    return needs_triton(site)


def causal_conv1d(x: Tensor, weight: Tensor, packed: PackedSequence, bias: Tensor | None, silu: bool) -> Tensor:
    """See `hf_packfree.ops.conv.causal_conv1d`."""
    size = math.gcd(x.shape[2], 128)  # no norm: any cut will do
    part = Part(0, x.shape[2] // size, size, False)
    (out,) = _apply(x, weight, packed, bias, silu, (part,), 0.0)
    return out.view(x.shape)


def qkv_conv(
    x: Tensor, weight: Tensor, packed: PackedSequence, bias: Tensor | None, silu: bool,
    heads: tuple[int, int], sizes: tuple[int, int], eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `hf_packfree.ops.conv.qkv_conv`."""
    keys = heads[0] * sizes[0]
    q, k = (Part(first, heads[0], sizes[0], True) for first in (0, keys))
    v = Part(2 * keys, heads[1], sizes[1], False)
    return _apply(x, weight, packed, bias, silu, (q, k, v), eps)  # type: ignore[return-value]


def token_ages(packed: PackedSequence) -> Tensor:
    """Return int32 [T]: each token's place in its document."""
    return packed.position_ids()[0].int()


def _apply(
    x: Tensor, weight: Tensor, packed: PackedSequence, bias: Tensor | None, silu: bool, parts: tuple[Part, ...], eps: float
) -> tuple[Tensor, ...]:
    ages = packed.derive(token_ages)
    return _Convolution.apply(x, weight, bias, ages, parts, silu, eps)  # type: ignore[no-any-return,no-untyped-call]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ages: Tensor, parts: tuple[Part, ...], silu: bool, eps: float
    ) -> tuple[Tensor, ...]:
        x = x if x.stride(2) == 1 else x.contiguous()
        ctx.save_for_backward(x, weight, bias, ages)
        ctx.parts, ctx.silu, ctx.eps = parts, silu, eps
        return tuple(_forward_part(x[0], weight, bias, ages, part, silu, eps) for part in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, ages = ctx.saved_tensors
        d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        d_taps = weight.new_empty(5, weight.shape[0], dtype=torch.float32)
        for part, d_out in zip(ctx.parts, d_outs, strict=True):
            d_taps[:, part.channels] = _backward_part(x[0], weight, bias, ages, d_out, d_x[0], part, ctx.silu, ctx.eps)
        d_weight = d_taps[: weight.shape[1]].flip(0).T.to(weight.dtype)
        return d_x, d_weight, None if bias is None else d_taps[4].to(bias.dtype), None, None, None, None


def _forward_part(
    x: Tensor, weight: Tensor, bias: Tensor | None, ages: Tensor, part: Part, silu: bool, eps: float
) -> Tensor:
    from hf_packfree.ops.conv.triton_kernels import convolve

    out = x.new_empty(1, len(x), part.heads, part.size)
    mine, taps, shift = x[:, part.channels], weight[part.channels].contiguous(), _bias(bias, part)
    grid, launch = _launch(len(x), part)
    with torch.cuda.device_of(x):  # whatever the current device is
        convolve[grid](
            mine, taps, shift, ages, out, len(x), mine.stride(0), part.heads, part.size, eps,
            weight.shape[1], bias is not None, silu, part.unit, **launch,
        )  # fmt: skip
    return out


def _backward_part(
    x: Tensor, weight: Tensor, bias: Tensor | None, ages: Tensor, d_out: Tensor, d_x: Tensor, part: Part, silu: bool, eps: float
) -> Tensor:
    """Write the part of d_x [T, C], and return the gradients of the taps, newest first, and of the bias: [5, channels]."""
    from hf_packfree.ops.conv.triton_kernels import convolve_backward

    mine, taps, target = x[:, part.channels], weight[part.channels].contiguous(), d_x[:, part.channels]
    grid, launch = _launch(len(x), part)
    d_taps = x.new_empty(grid[0], 5, part.heads * part.size, dtype=torch.float32)
    with torch.cuda.device_of(x):
        convolve_backward[grid](
            mine, taps, _bias(bias, part), ages, d_out.contiguous(), target, d_taps, len(x), mine.stride(0),
            target.stride(0), part.heads, part.size, eps, weight.shape[1], bias is not None, silu, part.unit, **launch,
        )  # fmt: skip
    return d_taps.sum(0)


def _bias(bias: Tensor | None, part: Part) -> Tensor | None:
    return None if bias is None else bias[part.channels]


def _launch(tokens: int, part: Part) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid, (strips, blocks of heads), and what one program works on."""
    width = block_width(part.size)
    heads = max(1, _CHANNELS // width)
    launch = {"STRIP": _STRIP, "BLOCK_H": heads, "BLOCK_D": width, "num_warps": _WARPS}
    return (-(-tokens // _STRIP), -(-part.heads // heads)), launch
