"""Exchanges between the ranks of a context-parallel group, differentiable.

Every rank takes part in every exchange, forward and backward, whatever its part of the row holds:
which exchanges there are depends on the whole row alone.

Shapes: W ranks, T tokens of the whole row, t = T / W tokens of a shard, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.packing import PackedSequence, RowShard, pad_row, shard_of
from hf_packfree.parallel.roll_call import refuse_lost_ranks


@dataclass(frozen=True)
class Pending:
    """An asynchronous exchange: it overlaps with the kernels launched until `wait`, with gloo with
    what the host computes.

    Attributes:
        out: the result, not to be read before `wait`.
        sent: kept until then.
        work: torch.distributed's.
        group: whose ranks exchange.
    """

    out: Tensor
    sent: Tensor
    work: Any
    group: Any

    def wait(self) -> Tensor:
        """Return what came.

        Raises:
            RankLost: gloo has lost a rank; NCCL ends the process by itself.
        """
        try:
            self.work.wait()
        except RuntimeError as error:
            refuse_lost_ranks(self.group, error)
            raise
        return self.out


def start_all_to_all(parts: Tensor, group: Any) -> Pending:
    """Start what `all_to_all` does, without a derivative."""
    parts = parts.contiguous()
    out = torch.empty_like(parts)
    work = dist.all_to_all_single(out, parts, group=group, async_op=True)
    return Pending(out, parts, work, group)


def start_gather(part: Tensor, group: Any) -> Pending:
    """Start what `gathered` does."""
    part = part.contiguous()
    out = part.new_empty(dist.get_world_size(group), *part.shape)
    # its name before torch 2.13
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = gather(out.view(-1), part.view(-1), group=group, async_op=True)
    return Pending(out, part, work, group)


def gathered(part: Tensor, group: Any) -> Tensor:
    """Return [W, ...], every rank's part [...], without a derivative."""
    return start_gather(part, group).wait()


class AllToAll:
    """All-to-all of parts [W, ...], of one shape on all ranks: part r of the result [W, ...] came
    from rank r.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.pending: Any = None

    def send(self, x: Tensor) -> None:
        """Start it."""
        self.pending = start_all_to_all(x, self.group)

    def send_back(self, d_out: Tensor) -> None:
        """Start to send the gradient of what came to where it came from."""
        self.pending = start_all_to_all(d_out, self.group)

    def receive(self) -> Tensor:
        """Return what came."""
        pending, self.pending = self.pending, None
        return pending.wait()  # type: ignore[no-any-return]

    def receive_back(self) -> Tensor:
        """Return the gradient of what was sent."""
        return self.receive()


class AllGather(AllToAll):
    """All-gather of parts [...] to [W, ...]. Backward: reduce-scatter (sum) of the gathered
    gradient.
    """

    def send(self, x: Tensor) -> None:
        """Start it."""
        self.pending = start_gather(x, self.group)

    def receive_back(self) -> Tensor:
        """Return the gradient of what was sent."""
        return self.receive().sum(0)


class Sent:
    """A differentiable asynchronous exchange, from here until `receive`.

    What is computed between the two overlaps with it, and its backward pass with the exchange of
    gradients.
    """

    def __init__(self, x: Tensor, exchange: AllToAll) -> None:
        """Send x."""
        self._exchange, self._token = exchange, _Send.apply(x, exchange)

    def receive(self) -> Tensor:
        """Return what came."""
        return _Receive.apply(self._token, self._exchange)  # type: ignore[no-any-return]


class _Send(Function):
    """Its result has no elements: it makes autograd run this backward after that of everything
    between `_Receive` and here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: AllToAll) -> Tensor:
        ctx.exchange = exchange
        exchange.send(x)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.receive_back(), None


class _Receive(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, exchange: AllToAll) -> Tensor:
        ctx.exchange = exchange
        return exchange.receive()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.send_back(d_out)
        return d_out.new_empty(0), None


def all_to_all(parts: Tensor, group: Any) -> Tensor:
    """See `AllToAll`; differentiable."""
    return Sent(parts, AllToAll(group)).receive()


def all_gather(part: Tensor, group: Any) -> Tensor:
    """See `AllGather`; differentiable."""
    return Sent(part, AllGather(group)).receive()


def gather_row(x: Tensor, packed: PackedSequence) -> Tensor:
    """Return [T, ...], all ranks' tokens, of x [t, ...], this rank's; x itself of a whole row.
    Differentiable.
    """
    return all_gather(x, shard_of(packed).group).flatten(0, 1) if packed.is_shard else x


def sum_over_ranks(x: Tensor, packed: PackedSequence) -> Tensor:
    """Return the sum of what the ranks that share a row have, without a derivative; x itself of a
    whole row.
    """
    return gathered(x, shard_of(packed).group).sum(0) if packed.is_shard else x


def with_right_context(x: Tensor, packed: PackedSequence, reach: int) -> Tensor:
    """Return [t + reach, ...]: a rank's tokens x [t, ...] and those that follow them, zeros after
    the row's end; x itself of a whole row.

    If no document is on several ranks, nothing is exchanged and the tokens are zeros: nobody reads
    them.
    """
    if not packed.is_shard:
        return x
    shard, following = shard_of(packed), x[:0]
    if shard.is_cut:
        following = all_gather(x[:reach], shard.group)[shard.rank + 1 :].flatten(0, 1)[:reach]
    return pad_row(torch.cat([x, following])[None], len(x) + reach)[0]


def send_heads(parts: Iterable[Tensor], group: Any) -> Sent:
    """Start to give each rank its share of the heads of these tokens, of tensors [t, H, ...] that
    may have different numbers.

    W divides each H; rank r gets heads r H / W up to (r + 1) H / W.

    Returns:
        What receives [W, t, sum of H / W, ...]: flattened, all tokens of this rank's heads.
    """
    world = dist.get_world_size(group)
    return Sent(
        torch.cat([part.unflatten(1, (world, -1)).transpose(0, 1) for part in parts], 2),
        AllToAll(group),
    )


def heads_to_tokens(x: Tensor, group: Any) -> Tensor:
    """Return [t, H, ...], all heads of this rank's tokens, of x [T, H / W, ...], all tokens of
    this rank's heads.
    """
    world = dist.get_world_size(group)
    return all_to_all(x.unflatten(0, (world, -1)), group).transpose(0, 1).flatten(1, 2)


def send_left_context(x: Tensor, shard: RowShard, most: int | None = None) -> Callable[[], Tensor]:
    """Start to fetch the last tokens before a shard that belong to its first document, at most
    `most`. If no document is on several ranks, nothing is sent.

    Args:
        x: [t, ...], this rank's.

    Returns:
        A function that waits and returns [h, ...], h = `shard.history`, or `most` if that is less.
    """
    histories = [
        shard.history(rank) if most is None else min(most, shard.history(rank))
        for rank in range(shard.world)
    ]
    # a longer history spans whole shards between, which are sent whole
    longest = min(max(histories), len(x))
    if not longest:
        return lambda: x[:0]
    sent = Sent(x[-longest:], AllGather(shard.group))

    def receive() -> Tensor:
        tails = sent.receive()[: shard.rank].flatten(0, 1)
        return tails[len(tails) - histories[shard.rank] :]

    return receive
