"""The record of a captured row: the tensors that its kernels read are overwritten for each row that
is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from hf_packfree.packing import PackedSequence

OF_ONE_ROW = frozenset(
    {"cu_seqlens_cpu", "lengths", "num_documents", "num_real_tokens", "indices", "padding_segments"}
)
"""Attributes that differ between the rows of a bucket and are known on the host: code that reads
them outside of a plan cannot be replayed for another row.
"""


class NotCapturable(Exception):
    """The layers cannot be captured; the message is the reason, as part of a sentence."""

    @classmethod
    def read(cls, name: str) -> NotCapturable:
        """Return the error for a layer that reads this attribute of the record."""
        return cls(f"a layer reads {name} of the record, which differs between rows")


class SomeTree:
    """Stands for the tree of a captured row; reading the tree itself, which differs between rows,
    raises.
    """

    def __getattr__(self, name: str) -> Any:
        raise NotCapturable.read(f"tree.{name}")


class OtherPlan(Exception):
    """A row's plan does not fit into the captured plan's tensors."""


class CapturedSequence(PackedSequence):
    """A record that keeps every plan made from it, with the function and arguments that made it.

    Attributes:
        made: (build, arguments, plan) of each plan.
        building: one entry for each plan that is being made; only meanwhile may `OF_ONE_ROW` be
            read.
    """

    made: list[tuple[Callable[..., Any], tuple[Any, ...], Any]]
    building: list[None]

    @classmethod
    def of(cls, packed: PackedSequence) -> CapturedSequence:
        """Return a captured record of the same row, without plans."""
        captured = cls(**{**vars(packed), "_memo": {}})
        vars(captured).update(made=[], building=[])
        return captured

    def __getattribute__(self, name: str) -> Any:
        if name in OF_ONE_ROW and not object.__getattribute__(self, "building"):
            raise NotCapturable.read(name)
        found = super().__getattribute__(name)
        # layers may ask whether there is a tree
        return SomeTree() if name == "tree" and found is not None and not self.building else found

    def cached(self, build: Callable[..., Any], *args: Any) -> Any:
        """See `PackedSequence.cached`."""
        known = len(self._memo)
        self.building.append(None)
        try:
            plan = super().cached(build, *args)
        finally:
            self.building.pop()
        if len(self._memo) > known:
            # the last entry, since the plans that this plan was made from came before
            key = next(reversed(self._memo))
            plan = self._memo[key] = _remembering(plan)
            self.made.append((build, args, plan))
        return plan

    def pairs(self, packed: PackedSequence) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of tensors: each that kernels read for this row, and its counterpart for
        another row.

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
            packed: the other row's record, which may be on the host.

        Raises:
            OtherPlan: a tensor has another size, or a plan's numbers on the host differ from the
                captured ones; nothing was written.
        """
        for old, new in list(self.pairs(packed)):
            old.copy_(new, non_blocking=True)


def _remembering(plan: Any) -> Any:
    """Return a plan in which records, of rows built from this row, are `CapturedSequence`s too."""
    if isinstance(plan, PackedSequence):
        return CapturedSequence.of(plan)
    if isinstance(plan, (tuple, list)):
        parts = [_remembering(part) for part in plan]
        return type(plan)(*parts) if hasattr(plan, "_fields") else type(plan)(parts)
    return plan


def tensors_of(plan: Any, other: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tensors of two plans in pairs.

    Raises:
        OtherPlan: the plans differ in anything but the tensors' elements.
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
