"""Differentiable exchanges between the ranks of a context-parallel group.

Every rank takes part in every exchange, forward and backward, whatever its shard contains, because
the exchanges depend only on the whole row.

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
    """An asynchronous exchange, which overlaps with kernels that are launched before `wait`; with
    gloo, with computation on the host.

    Attributes:
        out: the result; do not read it before `wait`.
        sent: the tensor that is sent, kept alive until `wait`.
        work: torch.distributed's handle.
        group: the process group.
    """

    out: Tensor
    sent: Tensor
    work: Any
    group: Any

    def wait(self) -> Tensor:
        """Wait for the exchange and return the result.

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
    """Start an all-to-all of parts [W, ...] without a derivative: part r of the result [W, ...] is
    from rank r.
    """
    parts = parts.contiguous()
    out = torch.empty_like(parts)
    work = dist.all_to_all_single(out, parts, group=group, async_op=True)
    return Pending(out, parts, work, group)


def start_gather(part: Tensor, group: Any) -> Pending:
    """Start an all-gather of a part [...] to [W, ...] without a derivative."""
    part = part.contiguous()
    out = part.new_empty(dist.get_world_size(group), *part.shape)
    # `all_gather_into_tensor` is the name before torch 2.13
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = gather(out.view(-1), part.view(-1), group=group, async_op=True)
    return Pending(out, part, work, group)


def gathered(part: Tensor, group: Any) -> Tensor:
    """Return the parts [...] of all ranks, [W, ...], without a derivative."""
    return start_gather(part, group).wait()


class AllToAll:
    """All-to-all of parts [W, ...], of one shape on all ranks: part r of the result [W, ...] is
    from rank r. Backward: all-to-all of the result's gradient.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.pending: Any = None

    def send(self, x: Tensor) -> None:
        """Start the all-to-all of x."""
        self.pending = start_all_to_all(x, self.group)

    def send_back(self, d_out: Tensor) -> None:
        """Start to send the gradient of each part of the result to the rank that sent the part."""
        self.pending = start_all_to_all(d_out, self.group)

    def receive(self) -> Tensor:
        """Wait for the exchange and return its result."""
        pending, self.pending = self.pending, None
        return pending.wait()  # type: ignore[no-any-return]

    def receive_back(self) -> Tensor:
        """Return the gradient of the x that was sent."""
        return self.receive()


class AllGather(AllToAll):
    """All-gather of parts [...] to [W, ...]. Backward: reduce-scatter (sum) of the gathered
    gradient.
    """

    def send(self, x: Tensor) -> None:
        """Start the all-gather of x."""
        self.pending = start_gather(x, self.group)

    def receive_back(self) -> Tensor:
        """Return the gradient of the x that was sent."""
        return self.receive().sum(0)


class Sent:
    """A differentiable asynchronous exchange of x, from the constructor until `receive`.

    Computation between the constructor and `receive` overlaps with the exchange, and the backward
    pass of that computation with the exchange of gradients.
    """

    def __init__(self, x: Tensor, exchange: AllToAll) -> None:
        """Start to send x."""
        self._exchange, self._token = exchange, _Send.apply(x, exchange)

    def receive(self) -> Tensor:
        """Return the result of the exchange."""
        return _Receive.apply(self._token, self._exchange)  # type: ignore[no-any-return]


class _Send(Function):
    """Starts an exchange. The result has no elements and is an input of `_Receive`, so that
    autograd runs this backward after those of the computation in between.
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
    """Return the result of `AllToAll` of parts [W, ...], [W, ...]; differentiable."""
    return Sent(parts, AllToAll(group)).receive()


def all_gather(part: Tensor, group: Any) -> Tensor:
    """Return the result of `AllGather` of a part [...], [W, ...]; differentiable."""
    return Sent(part, AllGather(group)).receive()


def gather_row(x: Tensor, packed: PackedSequence) -> Tensor:
    """Gather all ranks' tokens [T, ...] from this rank's x [t, ...]; if `packed` is a whole row,
    return x. Differentiable.
    """
    return all_gather(x, shard_of(packed).group).flatten(0, 1) if packed.is_shard else x


def sum_over_ranks(x: Tensor, packed: PackedSequence) -> Tensor:
    """Return the sum of x over the ranks that share a row, without a derivative; if `packed` is a
    whole row, return x.
    """
    return gathered(x, shard_of(packed).group).sum(0) if packed.is_shard else x


def largest_of_ranks(x: Tensor, packed: PackedSequence) -> Tensor:
    """Return the largest x, a scalar, of the ranks that share a row, without a derivative; if
    `packed` is a whole row, return x.
    """
    return gathered(x, shard_of(packed).group).max() if packed.is_shard else x


def with_right_context(x: Tensor, packed: PackedSequence, reach: int) -> Tensor:
    """Return a rank's tokens x [t, ...] with the `reach` tokens of the row that follow, [t + reach,
    ...], zeros after the row's end; if `packed` is a whole row, return x. Differentiable.

    If no document is on several ranks, nothing is exchanged, and the following tokens are zeros,
    which nobody reads.
    """
    if not packed.is_shard:
        return x
    shard, following = shard_of(packed), x[:0]
    if shard.is_cut:
        following = all_gather(x[:reach], shard.group)[shard.rank + 1 :].flatten(0, 1)[:reach]
    return pad_row(torch.cat([x, following])[None], len(x) + reach)[0]


def send_heads(parts: Iterable[Tensor], group: Any) -> Sent:
    """Start to send each rank its share of the heads of this rank's tokens, from tensors [t, H,
    ...], whose H may differ.

    W divides each H; rank r gets heads r H / W up to (r + 1) H / W.

    Returns:
        A `Sent` whose result is [W, t, sum of H / W, ...]: all tokens of this rank's heads, [T, sum
        of H / W, ...] once the first two dimensions are flattened.
    """
    world = dist.get_world_size(group)
    return Sent(
        torch.cat([part.unflatten(1, (world, -1)).transpose(0, 1) for part in parts], 2),
        AllToAll(group),
    )


def heads_to_tokens(x: Tensor, group: Any) -> Tensor:
    """Exchange x [T, H / W, ...], all tokens of this rank's heads, for all heads of this rank's
    tokens, [t, H, ...]. Differentiable.
    """
    world = dist.get_world_size(group)
    return all_to_all(x.unflatten(0, (world, -1)), group).transpose(0, 1).flatten(1, 2)


def send_left_context(x: Tensor, shard: RowShard, most: int | None = None) -> Callable[[], Tensor]:
    """Start to fetch the tokens before a shard that belong to its first document, at most the last
    `most` of them. If no document is on several ranks, nothing is sent.

    Args:
        x: [t, ...], this rank's tokens.

    Returns:
        A function that waits and returns these tokens, [h, ...], where h is
        `shard.history(shard.rank)`, at most `most`.
    """
    histories = [
        shard.history(rank) if most is None else min(most, shard.history(rank))
        for rank in range(shard.world)
    ]
    # a history longer than a shard contains whole shards, which are sent whole
    longest = min(max(histories), len(x))
    if not longest:
        return lambda: x[:0]
    sent = Sent(x[-longest:], AllGather(shard.group))

    def receive() -> Tensor:
        tails = sent.receive()[: shard.rank].flatten(0, 1)
        return tails[len(tails) - histories[shard.rank] :]

    return receive
