"""Replays that are launched ahead: before the host has read where the row's documents start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_packfree.graphs.capture import Graph, Pool
from hf_packfree.packing import PackedSequence

MISSES = 4
"""How many replays may be of no use; and one more for every `HITS` that are of use."""
HITS = 16
AGAIN = 64
"""Where too many were of no use, every this many-th row is tried all the same."""
Inputs = tuple[Tensor, Tensor]
"""A row's ids or embeddings, and its positions."""


@dataclass(frozen=True, eq=False)
class Launched:
    """A replay that runs beside the current stream.

    Attributes:
        key: of the graph, see `Runner.graphs`.
        graph, inputs: what was launched, and with what, see `Graph.launch`.
        embeddings: those of the row, [1, T, D].
        pool: beside which stream it runs.
        given: where the row's inputs were in memory, and their versions.
        on_host: bool [T] on the host: where documents start for the graph. Read only when the host
            has waited for them.
    """

    key: Any
    graph: Graph
    embeddings: Tensor
    inputs: Inputs
    pool: Pool
    given: Any
    on_host: Tensor

    def fits(self, given: Inputs, packed: PackedSequence) -> bool:
        """Whether the replay is for these inputs and documents."""
        offsets = packed.cu_seqlens_cpu[:-1].long()
        return (
            self.given == identity_of(given)
            and len(self.on_host) == packed.num_tokens
            and torch.equal(self.on_host.nonzero()[:, 0], offsets)
            and self.key[0].holds(packed)
        )


class Ahead:
    """The last replay that was launched ahead, until its row takes the result.

    Attributes:
        taken: how many rows took theirs.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._credit, self._passed = float(MISSES), 0
        self._launched: Launched | None = None
        self._embedded: Launched | None = None

    def pays(self) -> bool:
        """Whether to launch for the next row: most replays were of use, each of the others took the
        GPU a forward pass; or none was launched for long.
        """
        self._passed += 1
        if self._credit < 1 and self._passed < AGAIN:
            return False
        self._passed = 0
        return True

    def embeddings(self, given: Inputs) -> Tensor | None:
        """Return the embeddings of a row that a replay was launched for, whatever its documents
        are, or None.
        """
        found = self._embedded
        return found.embeddings if found and found.given == identity_of(given) else None

    def launch(self, launched: Launched) -> None:
        """Launch a replay."""
        launched.graph.launch(launched.inputs, launched.pool)
        self._launched = self._embedded = launched

    def take(self, given: Inputs, packed: PackedSequence) -> Launched | None:
        """Return the replay, now done for the current stream, if it is for these inputs and
        documents, else None.
        """
        found = self._launched
        if found is None or not found.fits(given, packed):
            return None
        self._launched = None
        self.taken += 1
        self._credit = min(MISSES, max(self._credit, 1) + 1 / HITS)
        found.pool.join()
        return found

    def drop(self) -> None:
        """Forget a replay whose result nobody takes, and its row's embeddings."""
        self.drop_result()
        self._embedded = None

    def drop_result(self) -> None:
        """Forget a replay whose result nobody takes; its row's embeddings are kept."""
        if self._launched is not None:
            self._credit -= 1
            self._launched.pool.join()
            self._launched = None


def identity_of(given: Inputs) -> Any:
    """Return where inputs are in memory, and their versions; inference tensors have none."""
    versions = (None if x.is_inference() else x._version for x in given)
    return [(x.data_ptr(), x.shape, x.dtype, n) for x, n in zip(given, versions, strict=True)]


def widest(keys: Sequence[Any]) -> Any:
    """Return the graph that holds every row which one of these does, by its bounds; if there is
    none, the most recently used one, which comes last.
    """
    documents, longest = (
        max(getattr(bucket, name) for bucket, _ in keys) for name in ("documents", "longest")
    )
    held = [key for key in keys if (key[0].documents, key[0].longest) == (documents, longest)]
    return (held or keys)[-1]
