"""Exchanges between the ranks of a context-parallel group, differentiable.

Every rank takes part in every exchange, forward and backward, whatever its part of the row holds: which exchanges there are
depends on the whole row alone.

Shapes: W ranks, T tokens of the whole row, t = T / W tokens of a shard, H heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_packfree.ops.operation import Operation, once_differentiable
from hf_packfree.packing import RowShard, pad_row


class _AllToAll(Operation):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        return _exchanged(d_out, ctx.group), None


class _AllGather(Operation):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gathered(part, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        return _exchanged(d_out, ctx.group).sum(0), None


def _exchanged(parts: Tensor, group: Any) -> Tensor:
    parts = parts.contiguous()
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts, group=group)
    return out


def gathered(part: Tensor, group: Any) -> Tensor:
    """Return [W, ...], every rank's part [...], without a derivative."""
    out = part.new_empty(dist.get_world_size(group), *part.shape)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    gather(out.view(-1), part.reshape(-1), group=group)
    return out


def all_to_all(parts: Tensor, group: Any) -> Tensor:
    """Return [W, ...]: part r is what rank r had as its part for this rank; parts [W, ...] of one shape on all ranks."""
    return _AllToAll.apply(parts, group)  # type: ignore[no-any-return]


def all_gather(part: Tensor, group: Any) -> Tensor:
    """Return [W, ...], every rank's part [...]; a part's gradient is the sum of what all ranks say of it."""
    return _AllGather.apply(part, group)  # type: ignore[no-any-return]


def with_right_context(x: Tensor, shard: RowShard, reach: int) -> Tensor:
    """Return [t + reach, ...]: a rank's tokens x [t, ...] and those behind them, zeros behind the row.

    Where no document is on several ranks nothing is exchanged, and zeros stand for what is of no use.
    """
    behind = x[:0]
    if shard.is_cut:
        behind = all_gather(x[:reach], shard.group)[shard.rank + 1:].flatten(0, 1)[:reach]
    return pad_row(torch.cat([x, behind])[None], len(x) + reach)[0]


def tokens_to_heads(x: Tensor, group: Any) -> Tensor:
    """Return [T, H / W, ...], all tokens of this rank's heads, of x [t, H, ...], all heads of this rank's tokens.

    W divides H; rank r has heads r H / W up to (r + 1) H / W.
    """
    world = dist.get_world_size(group)
    return all_to_all(x.unflatten(1, (world, -1)).transpose(0, 1), group).flatten(0, 1)


def heads_to_tokens(x: Tensor, group: Any) -> Tensor:
    """Return [t, H, ...] of x [T, H / W, ...]: the inverse of `tokens_to_heads`."""
    world = dist.get_world_size(group)
    return all_to_all(x.unflatten(0, (world, -1)), group).transpose(0, 1).flatten(1, 2)


def left_context(x: Tensor, shard: RowShard, most: int | None = None) -> Tensor:
    """Return the tokens before a shard that are of its first document, `most` of them at most; nothing is sent if none is cut.

    Args:
        x: [t, ...], this rank's.

    Returns:
        [h, ...], h = `shard.history`, or `most` if that is less.
    """
    histories = [shard.history(rank) if most is None else min(most, shard.history(rank)) for rank in range(shard.world)]
    longest = min(max(histories), len(x))  # beyond that ranks between are inside the document, and give all they have
    if not longest:
        return x[:0]
    tails = all_gather(x[-longest:], shard.group)[: shard.rank].flatten(0, 1)
    return tails[len(tails) - histories[shard.rank]:]
