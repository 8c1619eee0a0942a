"""The one record of where each document starts and ends.

Shapes: B rows, S tokens of a row as the caller has it, T tokens of the one packed row, N segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_packfree.errors import BoundaryError
from hf_packfree.packing.compiling import uncompiled_when_called
from hf_packfree.packing.opaque import opaque, replaced
from hf_packfree.packing.pinned import to_device
from hf_packfree.packing.tree import Tree

if TYPE_CHECKING:
    from hf_packfree.packing.shard import RowShard

_Plan = TypeVar("_Plan")
Integers = NDArray[np.integer[Any]]


def group_numbers(sizes: Integers) -> tuple[Integers, Integers]:
    """Return int32 [N+1], the offsets of N groups, and int32 [M], every element's group.

    Made with numpy, whose calls on short arrays take less time than torch's: the GPU waits for the
    record.

    Args:
        sizes: integers [N], each at least 1, of sum M.
    """
    offsets = np.zeros(len(sizes) + 1, dtype=np.int32)
    np.cumsum(sizes, out=offsets[1:])
    return offsets, np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)


def _sizes(lengths: Sequence[int] | Tensor | Integers) -> Integers:
    """Return document lengths as int64 [N]; refuse anything but integers of at least 1."""
    try:
        sizes = np.asarray(lengths.tolist() if isinstance(lengths, Tensor) else lengths)
        listed = isinstance(lengths, (list, tuple)) and any(
            isinstance(length, (bool, np.bool_)) for length in lengths
        )
    except (ValueError, RuntimeError):
        # lengths of several dimensions, or on meta
        sizes, listed = np.empty((0, 0)), False
    whole = sizes.ndim == 1 and (sizes.dtype.kind in "iu" or sizes.size == 0) and not listed
    if not whole or sizes.size == 0 or sizes.min() < 1:
        raise BoundaryError(
            f"found document lengths {sizes.tolist() if whole else lengths}; wanted one or more "
            "integers, each of at least one token; drop empty documents before packing"
        )
    # float64, which does not overflow
    total = sizes.sum(dtype=np.float64)
    if total > np.iinfo(np.int32).max:
        raise BoundaryError(
            f"found document lengths of {total:.0f} tokens together; wanted fewer than 2**31 for "
            "int32 offsets; cut the row"
        )
    return sizes


@opaque
@dataclass(frozen=True, eq=False, kw_only=True)
class PackedSequence:
    """Where each document starts and ends in one row of T tokens; built once per forward, never
    changed.

    A segment is a document's span in the row, or a span of padding that stays in the row.

    Attributes:
        cu_seqlens: int32 [N+1], on the model's device; offsets in tokens, 0 first, T last, strictly
            increasing.
        cu_seqlens_cpu: int32 [N+1], the same on the host, so that planning never waits for the
            device.
        seq_idx: int32 [1, T], on the model's device; the segment number of every token, 0 to N-1.
        max_seqlen: tokens in the longest segment; a host int, so that reading it never waits for
            the device.
        batch_shape: (B, S), the shape of the caller's batch and of the outputs that the caller
            gets.
        indices: int64 [T], on the model's device; each token's index into the caller's flattened
            [B*S], or None when the row is the whole batch in order (no padding was dropped).
        padding_segments: numbers of the segments that are padding: a tail that aligns the row, or
            the one token that stands for a batch of nothing but padding.
        left_pad_segments: numbers of those padding segments that hold the pad token before a
            left-padded document, kept because the document's first label is predicted from it;
            mixers output zeros there.
        plain: whether upstream too runs the caller's batch exactly: one document per row, padding
            in a 0/1 mask.
        shard: under context parallelism, where this rank's tokens are in the whole row; None: the
            row is whole. Most code only needs `is_shard`, `whole_row`, `whole_batch`, `ranks` or
            `cut`.
        tree: each segment's parent, where documents share prefixes; None: every segment is a
            document of its own.
        unread: how many of each document's first tokens only serve as context for the later ones:
            their outputs are not read; empty: none of any document.
        bounded: whether N, `max_seqlen` and the sizes of plans are bounds that other rows share,
            see `hf_packfree.graphs`: the last segments are empty then.
    """

    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor
    seq_idx: Tensor
    max_seqlen: int
    batch_shape: tuple[int, int]
    indices: Tensor | None = None
    padding_segments: tuple[int, ...] = ()
    left_pad_segments: tuple[int, ...] = ()
    plain: bool = False
    shard: RowShard | None = None
    tree: Tree | None = None
    unread: tuple[int, ...] = ()
    bounded: bool = False
    _memo: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    @uncompiled_when_called
    def from_lengths(
        cls,
        lengths: Sequence[int] | Tensor | Integers,
        *,
        device: torch.device | str = "cpu",
        batch_shape: tuple[int, int] | None = None,
        indices: Tensor | None = None,
        padding_segments: Sequence[int] = (),
        plain: bool = False,
    ) -> PackedSequence:
        """Build the record from document lengths.

        Args:
            lengths: N integers of at least 1, in tokens; a tensor should be on the host.
            device: of the tensors that kernels read.
            batch_shape: (B, S) of the caller's batch; (1, T) if not given.
            indices: int64 [T] on any device, see the class.
            padding_segments, plain: see the class.

        Raises:
            BoundaryError: a length is below 1 or no integer, there are no lengths, or their sum
                overflows int32.

        Examples:
            A document of three tokens and one of two, in a row whose `position_ids` restart with
            each document:

            >>> from hf_packfree import PackedSequence
            >>> packed = PackedSequence.from_lengths([3, 2])
            >>> packed.position_ids()
            tensor([[0, 1, 2, 0, 1]])
            >>> packed.cu_seqlens
            tensor([0, 3, 5], dtype=torch.int32)
            >>> packed.seq_idx
            tensor([[0, 0, 0, 1, 1]], dtype=torch.int32)
            >>> packed.max_seqlen
            3
        """
        sizes = _sizes(lengths)
        cu_seqlens, seq_idx = map(torch.from_numpy, group_numbers(sizes))
        return cls(
            cu_seqlens=to_device(cu_seqlens, device),
            cu_seqlens_cpu=cu_seqlens,
            max_seqlen=int(sizes.max()),
            seq_idx=to_device(seq_idx, device)[None],
            batch_shape=batch_shape or (1, len(seq_idx)),
            indices=None if indices is None else indices.to(device, non_blocking=True),
            padding_segments=tuple(padding_segments),
            plain=plain,
        )

    @classmethod
    def from_tree(
        cls,
        segment_lengths: Sequence[int] | Tensor | Integers,
        parents: Sequence[int | None] | Tensor,
        *,
        device: torch.device | str = "cpu",
    ) -> PackedSequence:
        """Build the record of a row in which documents share their beginnings: a forest of
        segments, laid depth first.

        A document is the path from a root to the document's last segment, which may have children.

        Args:
            segment_lengths: N integers of at least 1, in tokens.
            parents: the number of each segment's parent, which comes earlier in the row; None or -1
                for a root.
            device: of the tensors that kernels read.

        Returns:
            The record; the same as by `from_lengths` if every segment is a root.

        Raises:
            BoundaryError: see `from_lengths`; or a parent is not one of the segments before its
                child.

        Examples:
            A prompt of three tokens with answers of two and of one:

            >>> from hf_packfree import PackedSequence
            >>> packed = PackedSequence.from_tree([3, 2, 1], [None, 0, 0])
            >>> packed.position_ids()
            tensor([[0, 1, 2, 3, 4, 3]])
        """
        packed = cls.from_lengths(segment_lengths, device=device)
        tree = Tree.of(packed.lengths, parents)
        return packed if tree.is_flat else replaced(packed, tree=tree)

    @property
    def plan_offsets(self) -> Tensor:
        """`cu_seqlens`, where plans are made: on the host, so that nothing waits for the device."""
        return self.cu_seqlens_cpu

    @property
    def num_segments(self) -> int:
        """N, the number of segments in the row."""
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens in the row."""
        return self.seq_idx.shape[1]

    @property
    def num_documents(self) -> int:
        """The number of segments that are not padding; in a tree, the number of leaves."""
        if self.tree is not None:
            return len(self.tree.leaves)
        return self.num_segments - len(self.padding_segments)

    @property
    def has_padding(self) -> bool:
        """Whether the caller's batch has padding, dropped from the row or kept in it."""
        return self.indices is not None or bool(self.padding_segments)

    @property
    def num_real_tokens(self) -> int:
        """The number of tokens of the row that are not padding."""
        # does not read lengths, which would break a compiled graph
        if not self.padding_segments:
            return self.num_tokens
        return self.num_tokens - sum(map(self.lengths.__getitem__, self.padding_segments))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each segment, in row order."""
        return self.cu_seqlens_cpu.diff().tolist()

    @property
    def is_shard(self) -> bool:
        """Whether the record is of one rank's tokens of a row that ranks share."""
        return self.shard is not None

    @property
    def whole_row(self) -> PackedSequence:
        """The record of the whole row that ranks share; this record if the row is not shared."""
        return self if self.shard is None else self.shard.row

    @property
    def whole_batch(self) -> PackedSequence:
        """The record of the caller's batch that the row was made of."""
        return self if self.shard is None else self.shard.batch

    @property
    def ranks(self) -> int:
        """The number of ranks that share the row; 1 if it is not shared."""
        return 1 if self.shard is None else self.shard.world

    def cut(self, row: Tensor, dim: int = 1, *, more: int = 0, fill: float = 0) -> Tensor:
        """Return this rank's tokens of a tensor of the whole row, see `RowShard.cut`; the tensor
        itself where the row is whole.
        """
        return row if self.shard is None else self.shard.cut(row, dim, more=more, fill=fill)

    def position_ids(self) -> Tensor:
        """Return int64 [1, T]: each token's position in its segment, from 0; in a tree, on its path
        from the root.
        """
        if self.is_shard:
            return self.cut(self.whole_row.position_ids())

        def build(packed: PackedSequence) -> Tensor:
            firsts = packed.cu_seqlens
            if packed.tree is not None:
                before = torch.zeros(firsts.numel(), dtype=torch.int32, device="cpu")
                before[: len(packed.tree.before)] = torch.tensor(packed.tree.before)
                firsts = firsts - before.to(firsts.device, non_blocking=True)
            starts = firsts.index_select(0, packed.seq_idx[0]).long()
            return (torch.arange(packed.num_tokens, device=starts.device) - starts)[None]

        return self.cached(build)

    def is_real(self) -> Tensor:
        """Return bool [1, T]: False for padding that stayed in the row."""

        def build(packed: PackedSequence) -> Tensor:
            return packed._tokens_outside(packed.padding_segments)

        return self.cached(build)

    def select_real(self, row: Tensor) -> Tensor:
        """Return the real tokens [M, ...] of a row [T, ...]; the row itself when all are real,
        or none is.
        """
        if not self.padding_segments or self.num_real_tokens == 0:
            return row

        def build(packed: PackedSequence) -> Tensor:
            # indices from the host, which would wait for the number of indices on the device
            real = packed._segments_outside(packed.padding_segments)
            indices = np.flatnonzero(np.repeat(real.numpy(), packed.cu_seqlens_cpu.diff().numpy()))
            return torch.from_numpy(indices).to(packed.seq_idx.device, non_blocking=True)

        return row.index_select(0, self.cached(build))

    def zero_left_pad(self, mixed: Tensor) -> Tensor:
        """Return a mixer's output [1, T, D] with zeros at `left_pad_segments`; the same tensor
        when there are none.
        """
        if not self.left_pad_segments:
            return mixed

        def build(packed: PackedSequence) -> Tensor:
            return packed._tokens_outside(packed.left_pad_segments)[..., None]

        return mixed * self.cached(build).to(mixed.dtype)

    def _segments_outside(self, segments: Sequence[int]) -> Tensor:
        """Return bool [N] on the host: False for these segments."""
        outside = torch.ones(self.num_segments, dtype=torch.bool, device="cpu")
        outside[list(segments)] = False
        return outside

    def _tokens_outside(self, segments: Sequence[int]) -> Tensor:
        """Return bool [1, T]: False for the tokens of these segments."""
        return self._segments_outside(segments).to(self.seq_idx.device, non_blocking=True)[
            self.seq_idx.long()
        ]

    def for_shape(self, shape: Sequence[int]) -> PackedSequence:
        """Return the record for a batch of this (B, S): the caller's batch, or the row [1, T] it
        already became.
        """
        if tuple(shape) == self.batch_shape:
            return self
        return replaced(self, batch_shape=(1, self.num_tokens), indices=None)

    def cached(self, build: Callable[..., _Plan], *args: Any) -> _Plan:
        """Return `build(self, *args)`, computed at most once per record, so that all layers share
        one plan.

        Args:
            build: a function, identified by its line of code; it may be nested but no lambda, and
                its closure has to be the same for the same `args`. The result may not hold the
                record.
            args: values whose `repr` tells them apart.
        """
        # a string, since torch.compile's guards name it; with the line, since they take functions
        # of equal qualified names for equal
        code = build.__code__
        key = f"{code.co_filename}:{code.co_firstlineno} {args}"
        if key not in self._memo:
            # outside inference mode: a record of evaluation may be used in training later
            with torch.inference_mode(False):
                self._memo[key] = build(self, *args)
        return self._memo[key]  # type: ignore[no-any-return]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedSequence:
        """Return the record with its device tensors on `device`; accelerate's hooks call this
        method by name.
        """
        if self.cu_seqlens.device == torch.device(device):
            return self
        return replaced(
            self,
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=non_blocking),
            seq_idx=self.seq_idx.to(device, non_blocking=non_blocking),
            indices=None
            if self.indices is None
            else self.indices.to(device, non_blocking=non_blocking),
            shard=None
            if self.shard is None
            else replace(self.shard, row=self.shard.row.to(device, non_blocking)),
            _memo={},
        )
