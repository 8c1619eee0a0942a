"""Rows that are replayed ahead: before the host has read where their documents start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_packfree.packing import PackedSequence

MISSES = 4
"""How many results may be of no use; and one more for every `HITS` that are of use."""
HITS = 16
Inputs = tuple[Tensor, Tensor]
"""A row's ids or embeddings, and its positions, as the caller gave them."""


@dataclass(frozen=True, eq=False)
class Result:
    """What a graph computed for a row.

    Attributes:
        key: of the graph, see `Runner.graphs`.
        hidden: [1, T of the bucket, D].
        places: where the row's inputs were in memory, and their versions.
        starts: bool [T] on the host: where documents start for the graph. Read only when the host
            has waited for them.
    """

    key: Any
    hidden: Tensor
    places: Any
    starts: Tensor

    def fits(self, inputs: Inputs, packed: PackedSequence) -> bool:
        """Whether this is the result for these inputs and documents."""
        offsets = packed.cu_seqlens_cpu[:-1].long()
        return (
            self.places == _places(inputs)
            and len(self.starts) == packed.num_tokens
            and torch.equal(self.starts.nonzero()[:, 0], offsets)
            and self.key[0].holds(packed)
        )


class Ahead:
    """The result of the last row that was replayed ahead, until the row takes it.

    Attributes:
        taken: how many rows took theirs.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._missed = 0
        self._result: Result | None = None

    @property
    def pays(self) -> bool:
        """Whether most results were of use; each of the others took the GPU a forward pass."""
        return self._missed <= MISSES + self.taken // HITS

    def keep(self, key: Any, hidden: Tensor, inputs: Inputs, starts: Tensor) -> None:
        """Keep a result, see `Result`."""
        self._result = Result(key, hidden, _places(inputs), starts)

    def take(self, inputs: Inputs, packed: PackedSequence) -> Result | None:
        """Return the result if it is for these inputs and documents, else None."""
        found = self._result
        if found is None or not found.fits(inputs, packed):
            return None
        self._result = None
        self.taken += 1
        return found

    def drop(self) -> None:
        """Forget a result that was not taken, so that its graph is free again."""
        self._missed += self._result is not None
        self._result = None


def _places(inputs: Inputs) -> Any:
    return [(x.data_ptr(), x.shape, x.dtype, x._version) for x in inputs]
