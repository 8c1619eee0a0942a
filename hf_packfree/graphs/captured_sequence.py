"""The record of a captured row: what its kernels read is written anew for each row that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from hf_packfree.packing import PackedSequence

_OF_ONE_ROW = frozenset(
    {"cu_seqlens_cpu", "lengths", "num_documents", "num_real_tokens", "indices", "padding_segments"}
)
"""What differs between the rows of a bucket and is known on the host: code that reads it outside of
a plan could not be replayed for another row.
"""


class NotCapturable(Exception):
    """The layers cannot be captured; the message is the reason, as part of a sentence."""

    @classmethod
    def read(cls, name: str) -> NotCapturable:
        """Return what to raise where a layer reads that attribute of the record."""
        return cls(f"a layer reads {name} of the record, which differs between rows")


class SomeTree:
    """Says that a captured row has a tree; which one differs between rows."""

    def __getattr__(self, name: str) -> Any:
        raise NotCapturable.read(f"tree.{name}")


class OtherPlan(Exception):
    """A row's plan does not fit into the one that was captured."""


class CapturedSequence(PackedSequence):
    """A record that keeps every plan made from it, with the call that made it.

    Attributes:
        made: (build, arguments, plan) of each.
        building: how many plans are being made: only these may read what differs between rows.
    """

    made: list[tuple[Callable[..., Any], tuple[Any, ...], Any]]
    building: list[None]

    @classmethod
    def of(cls, packed: PackedSequence) -> CapturedSequence:
        """Return such a record of the same row, with no plan yet."""
        captured = cls(**{**vars(packed), "_memo": {}})
        vars(captured).update(made=[], building=[])
        return captured

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_ONE_ROW and not object.__getattribute__(self, "building"):
            raise NotCapturable.read(name)
        found = super().__getattribute__(name)
        # every layer asks whether there is one
        return SomeTree() if name == "tree" and found is not None and not self.building else found

    @property
    def num_segments(self) -> int:
        """N, the bucket's."""
        return self.cu_seqlens.numel() - 1

    def cached(self, build: Callable[..., Any], *args: Any) -> Any:
        """See `PackedSequence.cached`."""
        known = len(self._memo)
        self.building.append(None)
        try:
            plan = super().cached(build, *args)
        finally:
            self.building.pop()
        if len(self._memo) > known:
            # put there last, after what it was made of
            key = next(reversed(self._memo))
            plan = self._memo[key] = _remembering(plan)
            self.made.append((build, args, plan))
        return plan

    def pairs(self, packed: PackedSequence) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every tensor that kernels read of this row, and what it is for another one.

        Raises:
            OtherPlan: see `become`.
        """
        if self.max_seqlen != packed.max_seqlen:
            raise OtherPlan
        yield from tensors_of(self.cu_seqlens, packed.cu_seqlens)
        yield from tensors_of(self.seq_idx, packed.seq_idx)
        for build, args, plan in self.made:
            yield from tensors_of(plan, packed.cached(build, *args))

    def become(self, packed: PackedSequence) -> None:
        """Write another row's offsets and plans over this one's, on the device.

        Args:
            packed: its record, which may be on the host.

        Raises:
            OtherPlan: one of them has another size, or says something on the host that was
                captured; nothing was written.
        """
        for old, new in list(self.pairs(packed)):
            old.copy_(new, non_blocking=True)


def _remembering(plan: Any) -> Any:
    """Return a plan whose records, of rows made of the row, remember plans too."""
    if isinstance(plan, PackedSequence):
        return CapturedSequence.of(plan)
    if isinstance(plan, (tuple, list)):
        parts = [_remembering(part) for part in plan]
        return type(plan)(*parts) if hasattr(plan, "_fields") else type(plan)(parts)
    return plan


def tensors_of(plan: Any, other: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tensors of two plans in pairs.

    Raises:
        OtherPlan: they differ in anything but the tensors' elements.
    """
    if isinstance(plan, Tensor):
        if not _alike(plan, other):
            raise OtherPlan
        yield plan, other
    elif isinstance(plan, CapturedSequence):
        yield from plan.pairs(other)
    elif isinstance(plan, (tuple, list)):
        if type(plan) is not type(other) or len(plan) != len(other):
            raise OtherPlan
        for part, its in zip(plan, other, strict=True):
            yield from tensors_of(part, its)
    elif not isinstance(plan, (int, float, str, type(None))) or plan != other:
        raise OtherPlan


def _alike(plan: Tensor, other: Any) -> bool:
    return isinstance(other, Tensor) and plan.shape == other.shape and plan.dtype == other.dtype
