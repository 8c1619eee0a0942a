"""Replays that are launched ahead: before the host has read where the row's documents start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_packfree.graphs.capture import Graph, Pool
from hf_packfree.packing import PackedSequence

MISSES = 4
"""How many replays may be of no use; and one more for every `HITS` that are of use."""
HITS = 16
Inputs = tuple[Tensor, Tensor]
"""A row's ids or embeddings, and its positions."""


@dataclass(frozen=True, eq=False)
class Launched:
    """A replay that runs beside the current stream.

    Attributes:
        key: of the graph, see `Runner.graphs`.
        graph, inputs: what was launched, and with what, see `Graph.launch`.
        pool: beside which stream it runs.
        given: where the row's inputs were in memory, and their versions.
        starts: bool [T] on the host: where documents start for the graph. Read only when the host
            has waited for them.
    """

    key: Any
    graph: Graph
    inputs: Inputs
    pool: Pool
    given: Any
    starts: Tensor

    def fits(self, given: Inputs, packed: PackedSequence) -> bool:
        """Whether the replay is for these inputs and documents."""
        offsets = packed.cu_seqlens_cpu[:-1].long()
        return (
            self.given == places_of(given)
            and len(self.starts) == packed.num_tokens
            and torch.equal(self.starts.nonzero()[:, 0], offsets)
            and self.key[0].holds(packed)
        )


class Ahead:
    """The last replay that was launched ahead, until its row takes the result.

    Attributes:
        taken: how many rows took theirs.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._missed = 0
        self._launched: Launched | None = None

    @property
    def pays(self) -> bool:
        """Whether most replays were of use; each of the others took the GPU a forward pass."""
        return self._missed <= MISSES + self.taken // HITS

    def launch(self, launched: Launched) -> None:
        """Launch a replay."""
        launched.graph.launch(launched.inputs, launched.pool)
        self._launched = launched

    def take(self, given: Inputs, packed: PackedSequence) -> Launched | None:
        """Return the replay, now done for the current stream, if it is for these inputs and
        documents; else None, after `drop`.
        """
        found = self._launched
        if found is None or not found.fits(given, packed):
            self.drop()
            return None
        self._launched = None
        self.taken += 1
        found.pool.join()
        return found

    def drop(self) -> None:
        """Forget a replay whose result nobody takes."""
        if self._launched is not None:
            self._missed += 1
            self._launched.pool.join()
            self._launched = None


def places_of(given: Inputs) -> Any:
    """Return where inputs are in memory, and their versions."""
    return [(x.data_ptr(), x.shape, x.dtype, x._version) for x in given]
