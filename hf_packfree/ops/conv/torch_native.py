"""Depthwise causal convolution over packed documents in PyTorch eager.

The row is worked through in blocks of tokens that stay in the cache; what a tap would read from the
document before is set to zero. The input alone is saved; the backward pass recomputes the
preactivation.

silu is written as u / (1 + exp(-u)): torch's own rounds differently where a tensor ends within a
vector register, and values must not depend on a document's position in the row. For the same reason
nothing here fuses multiply and add.

Shapes: T tokens, C channels, W taps; n tokens of a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.packing import PackedSequence, uncompiled

# elements of a block on the CPU: a few such buffers fit in the cache
_BLOCK_ELEMENTS = 1 << 18


class TokenBlock(NamedTuple):
    """The tokens `low` to `high - 1`.

    Attributes:
        early: `early[back - 1]`, int64: which tokens of the block, counted from `first(back)`, have
            no token `back` positions before them in their document; None if all have one.
    """

    low: int
    high: int
    early: tuple[Tensor | None, ...]

    def first(self, back: int) -> int:
        """The first token of the block with one `back` positions before it in the row."""
        return max(self.low, back)


def plan_blocks(packed: PackedSequence, taps: int, size: int) -> tuple[TokenBlock, ...]:
    """Cut the row into blocks of `size` tokens; their tables are built on the host and moved to the
    row's device.
    """
    starts = packed.cu_seqlens_cpu[:-1].long()
    grid = starts[:, None] + torch.arange(taps - 1, device="cpu")
    inside = grid < packed.cu_seqlens_cpu[1:, None]
    edges, positions = grid[inside], (grid - starts[:, None])[inside]
    blocks = []
    for low in range(0, packed.num_tokens, size):
        block = TokenBlock(low, min(low + size, packed.num_tokens), ())
        early = []
        for back in range(1, taps):
            found = edges[
                (edges >= block.first(back)) & (edges < block.high) & (positions < back)
            ] - block.first(back)
            early.append(
                found.to(packed.cu_seqlens.device, non_blocking=True) if found.numel() else None
            )
        blocks.append(block._replace(early=tuple(early)))
    return tuple(blocks)


@uncompiled
def causal_conv1d(
    x: Tensor, weight: Tensor, packed: PackedSequence, bias: Tensor | None, silu: bool
) -> Tensor:
    """See `hf_packfree.ops.conv.causal_conv1d`."""
    size = max(1, _BLOCK_ELEMENTS // x.shape[2]) if x.device.type == "cpu" else packed.num_tokens
    blocks = packed.cached(plan_blocks, weight.shape[1], size)
    return _CausalConv1d.apply(x, weight, bias, blocks, silu)  # type: ignore[no-any-return]


class _CausalConv1d(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        blocks: tuple[TokenBlock, ...],
        silu: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.blocks, ctx.silu = blocks, silu
        out = x.new_empty(x.shape)
        taps = _taps(x, weight)
        for block in blocks:
            u = _preactivation(x[0], taps, bias, block)
            out[0, block.low : block.high] = u.div_(u.neg().exp_().add_(1)) if silu else u
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        needed = ctx.needs_input_grad[1]
        return *_backward(d_out, x, weight, bias, ctx.blocks, ctx.silu, needed), None, None


def _backward(
    d_out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    blocks: tuple[TokenBlock, ...],
    silu: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x, of the weight where it is needed, and of the bias."""
    taps = _taps(x, weight)
    d_x = x.new_empty(x.shape[1:], dtype=taps.dtype)
    d_taps, d_bias = torch.zeros_like(taps) if needs_weight else None, torch.zeros_like(taps[0])
    for block in blocks:
        d_u = d_out[0, block.low : block.high].to(taps.dtype, copy=True)
        if silu:
            d_u *= _silu_slope(_preactivation(x[0], taps, bias, block))
        if bias is not None:
            d_bias += d_u.sum(0)
        _taps_backward(x[0], taps, block, d_u, d_x, d_taps)
    d_weight = None if d_taps is None else d_taps.flip(0).T.to(weight.dtype)
    return d_x.to(x.dtype)[None], d_weight, None if bias is None else d_bias.to(bias.dtype)


def _taps(x: Tensor, weight: Tensor) -> Tensor:
    """The taps [W, C], the current token's first, in the dtype of accumulation: the weight's,
    but at least fp32.
    """
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return weight.T.flip(0).to(dtype)


def _preactivation(x: Tensor, taps: Tensor, bias: Tensor | None, block: TokenBlock) -> Tensor:
    """Convolve a block: [n, C], newest tap first."""
    u = x[block.low : block.high] * taps[0]
    for back in range(1, min(len(taps), block.high)):
        first = block.first(back)
        read = x[first - back : block.high - back] * taps[back]
        u[first - block.low :] += _mask_edges(read, block.early[back - 1])
    return u if bias is None else u.add_(bias)


def _taps_backward(
    x: Tensor, taps: Tensor, block: TokenBlock, d_u: Tensor, d_x: Tensor, d_taps: Tensor | None
) -> None:
    """Add a block's part to the gradients of x and, unless None, of the taps; overwrites d_u. A
    block also adds to d_x of tokens of the block before.
    """
    torch.mul(d_u, taps[0], out=d_x[block.low : block.high])
    if d_taps is not None:
        d_taps[0] += (d_u * x[block.low : block.high]).sum(0)
    for back in range(1, min(len(taps), block.high)):
        first = block.first(back)
        source = slice(first - back, block.high - back)
        d_tap = _mask_edges(d_u[first - block.low :], block.early[back - 1])
        d_x[source] += d_tap * taps[back]
        if d_taps is not None:
            d_taps[back] += (d_tap * x[source]).sum(0)


def _mask_edges(rows: Tensor, early: Tensor | None) -> Tensor:
    """Zero, in place, the rows that a tap would carry across the start of a document."""
    return rows if early is None else rows.index_fill_(0, early, 0)


def _silu_slope(u: Tensor) -> Tensor:
    """s (1 + u (1 - s)) with s = sigmoid(u); overwrites u."""
    gate = u.neg().exp_().add_(1).reciprocal_()
    return u.mul_(1 - gate).add_(1).mul_(gate)
