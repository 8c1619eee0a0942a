"""One rank's part of a packed row: equal spans of tokens, in order, one for each rank of a
context-parallel group.

Shapes: T tokens of the whole row, W ranks, t = T / W tokens of a shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from hf_packfree.errors import UnsupportedInput
from hf_packfree.packing.opaque import replaced
from hf_packfree.packing.record import PackedSequence
from hf_packfree.packing.tree import refuse_tree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False, kw_only=True)
class RowShard:
    """Where a rank's tokens are in the whole row; host integers only, so that a rank can compute
    the other ranks' spans too.

    Attributes:
        row: the record of the whole row, the same on all ranks; T is a multiple of W.
        batch: the record of the caller's batch, [B, S], from which the row was built.
        rank, world: this rank's number in its group, and W.
        group: the process group; None: the record is only used for plans, without exchanges.
        ways: {operation: how the ranks share it}, see `hf_packfree.ops.op.AcrossRanks`.
        features: {kind of media: slice}, which features, of the items with placeholders in this
            shard, belong to this shard's placeholders.
    """

    row: PackedSequence
    batch: PackedSequence
    rank: int
    world: int
    group: ProcessGroup | None
    ways: Mapping[str, str] = field(default_factory=dict)
    features: Mapping[str, slice] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """t, the number of tokens of every shard."""
        return self.row.num_tokens // self.world

    def cut(self, row: Tensor, dim: int = 1, *, more: int = 0, fill: float = 0) -> Tensor:
        """Return this rank's t tokens of a tensor of the whole row, and the `more` tokens that
        follow them.

        Args:
            row: with the row's tokens in dimension `dim`: T, or fewer where the row was padded.
            fill: the value for tokens that the tensor lacks at its end.
        """
        missing = self.row.num_tokens + more - row.shape[dim]
        if missing:
            after = row.ndim - 1 - dim % row.ndim
            row = F.pad(row, (0, 0) * after + (0, missing), value=fill)
        return row.narrow(dim, self.rank * self.tokens, self.tokens + more)

    @cached_property
    def _histories(self) -> list[int]:
        starts, offsets = np.arange(self.world) * self.tokens, self.row.cu_seqlens_cpu.numpy()
        return (starts - offsets[np.searchsorted(offsets, starts, side="right") - 1]).tolist()  # type: ignore[no-any-return]

    def history(self, rank: int) -> int:
        """Return how many tokens of the document at the start of a rank's shard are on the ranks
        before it.
        """
        return self._histories[rank]

    def goes_on(self, rank: int) -> bool:
        """Whether the last document of a rank's shard continues in the next rank's."""
        return rank + 1 < self.world and self.history(rank + 1) > 0

    @cached_property
    def is_cut(self) -> bool:
        """Whether any document is on several ranks."""
        return any(map(self.goes_on, range(self.world)))

    @cached_property
    def sent(self) -> int:
        """How many of its last tokens every rank sends when ranks gather the tokens before their
        shards.
        """
        return min(max(self._histories), self.tokens)

    def before(self) -> range:
        """Return the ranks before this one that hold parts of its first document."""
        first = self.rank
        while self.history(first):
            first -= 1
        return range(first, self.rank)

    def after(self) -> range:
        """Return the ranks after this one that hold parts of its last document, the last rank
        first.
        """
        last = self.rank
        while self.goes_on(last):
            last += 1
        return range(last, self.rank, -1)


def shard_row(
    packed: PackedSequence,
    rank: int,
    world: int,
    group: ProcessGroup | None = None,
    ways: Mapping[str, str] | None = None,
) -> PackedSequence:
    """Return the record of the tokens that one of `world` ranks holds; `shard` of the result
    describes the whole row.

    A row whose T is no multiple of `world` is padded by one segment. A segment of the result is a
    document's span on this rank; if the document began on an earlier rank, its `position_ids`
    continue.

    Args:
        packed: the record of a row of T tokens.
        rank, world, group, ways: see `RowShard`.

    Returns:
        The record of [1, t], t = ceil(T / world).

    Raises:
        UnsupportedInput: the row is a tree of shared prefixes.

    Examples:
        Documents of three tokens and of five on two ranks; the second document begins on the first
        rank:

        >>> from hf_packfree import PackedSequence
        >>> from hf_packfree.packing import shard_row
        >>> packed = PackedSequence.from_lengths([3, 5])
        >>> first, second = (shard_row(packed, rank, 2) for rank in range(2))
        >>> first.lengths, second.lengths
        ([3, 1], [4])
        >>> second.position_ids()
        tensor([[1, 2, 3, 4]])
    """
    refuse_tree(packed, "under context parallelism")
    shard = RowShard(
        row=_divisible(packed, world),
        batch=packed,
        rank=rank,
        world=world,
        group=group,
        ways=ways or {},
    )
    row, start = shard.row, rank * shard.tokens
    offsets = row.cu_seqlens_cpu.clamp(start, start + shard.tokens) - start
    lengths = offsets.diff()
    held = lengths.nonzero()[:, 0].tolist()
    local = PackedSequence.from_lengths(
        lengths[held],
        device=row.seq_idx.device,
        plain=row.plain,
        padding_segments=[
            number for number, segment in enumerate(held) if segment in row.padding_segments
        ],
    )
    left = tuple(number for number, segment in enumerate(held) if segment in row.left_pad_segments)
    return replaced(local, shard=shard, left_pad_segments=left)


def shard_of(packed: PackedSequence) -> RowShard:
    """Return the `shard` of a record that `shard_row` returned."""
    assert packed.shard is not None
    return packed.shard


def refuse_shard(packed: PackedSequence, what: str) -> None:
    """Refuse one rank's part of a row in a function that needs whole documents; `what` names the
    function.

    Raises:
        UnsupportedInput: `packed` is one rank's part of a row.
    """
    if packed.is_shard:
        raise UnsupportedInput(
            f"found one rank's part of a row given to {what}, which needs whole rows; wanted an "
            "operation whose ranks exchange what crosses their edges; call what `Op.running` "
            "returns, with an `Op` whose `across_ranks` says how, or leave context_parallel out"
        )


def without_row(packed: PackedSequence) -> PackedSequence:
    """Return the record of a shard's segments as documents of their own."""
    return packed.cached(_without_row)


def _without_row(packed: PackedSequence) -> PackedSequence:
    return replaced(packed, shard=None, _memo={})


def with_history(packed: PackedSequence, tokens: int) -> PackedSequence:
    """Return the record of a row whose first document has `tokens` more tokens at its beginning."""
    first, *rest = packed.lengths
    return PackedSequence.from_lengths([tokens + first, *rest], device=packed.seq_idx.device)


def pad_row(row: Tensor, tokens: int, value: float = 0) -> Tensor:
    """Return a tensor [1, T, ...] padded with `value` on the right, [1, tokens, ...]."""
    missing = tokens - row.shape[1]
    return F.pad(row, (0, 0) * (row.ndim - 2) + (0, missing), value=value) if missing else row


def _divisible(packed: PackedSequence, world: int) -> PackedSequence:
    """Return the record of the packed row, [1, T], with a padding segment at the end if T is no
    multiple of `world`.
    """
    missing = -packed.num_tokens % world
    if not missing:
        return packed.for_shape((1, packed.num_tokens))
    row = PackedSequence.from_lengths(
        [*packed.lengths, missing],
        device=packed.seq_idx.device,
        plain=packed.plain,
        padding_segments=(*packed.padding_segments, packed.num_segments),
    )
    return replaced(row, left_pad_segments=packed.left_pad_segments)
