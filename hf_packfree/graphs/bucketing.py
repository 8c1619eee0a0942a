"""Which graph a row is for, and when it is captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from hf_packfree.graphs.bucket import FEWER_STEPS, Bucket, bucket_of
from hf_packfree.packing import PackedSequence

CAPTURE = 8
"""What a capture is taken to cost, in times a replay of its row: rows run in the graph of longer
ones until their padding there has cost as much.
"""
LENGTHS = 2
"""Rows of so many lengths have graphs with hardly any padding; of rows of more lengths, each such
graph would be one more capture, for rows that its bucket's graph runs too.
"""
MOST = 24
"""The most graphs of one model; the least recently used is dropped. Also how many captures are
made; and one more for every REPLAYS replays, since a capture takes as long as some steps.
"""
REPLAYS = 16


@dataclass(eq=False, repr=False)
class Bucketing:
    """The buckets of one text model's rows. A key is (bucket, kind of inputs).

    Attributes:
        given_up: {key: why its graph is never captured}.
        no_room: from how many tokens on there is not enough memory for a graph, and how that was
            found; None: as far as is known, there is for all.
        captures: how many captures were tried, since settings changed.
    """

    given_up: dict[Any, str] = field(default_factory=dict)
    no_room: tuple[int, str] | None = None
    captures: int = 0
    _seen: Counter[Any] = field(default_factory=Counter)
    _padding: Counter[Any] = field(default_factory=Counter)
    _lengths: set[int] = field(default_factory=set)

    def start_anew(self) -> None:
        """Try again what could not be captured: settings changed."""
        self.given_up.clear()
        self.no_room, self.captures = None, 0

    def choose(
        self,
        packed: PackedSequence,
        kind: Any,
        graphs: Collection[Any],
        replayed: int,
        wait: bool,
    ) -> Any:
        """Return the key of the graph that a row is for, which is to be captured if it is not
        among `graphs`; or, as text, why the row runs without.

        Args:
            replayed: how many rows were replayed.
            wait: whether nothing may be captured, see `Graphs`.
        """
        held = _least(graphs, kind, lambda bucket: bucket.holds(packed))
        if held is not None:
            return held
        longer = in_longer(packed, kind, graphs)
        own, due = self._new_key(packed, kind, longer)
        key = _widened(own, graphs)
        why = self._why_not(key, due, bool(graphs), replayed, wait)
        if why is None:
            del self._padding[own]
            return key
        return why if longer is None else longer

    def _new_key(self, packed: PackedSequence, kind: Any, longer: Any) -> tuple[Any, bool]:
        """Return the key of a row that no graph holds, and whether to capture its graph now.

        Args:
            longer: the key of a graph that takes it, or None.
        """
        first, key = not self._seen, self._key_of(packed, kind)
        tree = packed.tree is not None
        coarse = key if tree else (bucket_of(packed, FEWER_STEPS), kind)
        self._seen[key] += 1
        if longer is None:
            again = self._seen[key] > 1
            # without a graph the row would take its memory beside that of graphs; in a bucket of
            # its own, each row that is a little longer than all before would drop all graphs
            return key if first or again else coarse, again if tree else not first
        for each in {coarse: None, key: None}:
            if each[0].tokens < longer[0].tokens:
                self._padding[each] += longer[0].tokens / each[0].tokens - 1
                if self._padding[each] >= CAPTURE:
                    return each, True
        return key, False

    def _key_of(self, packed: PackedSequence, kind: Any) -> Any:
        """Return the bucket of a row: with hardly any padding if T comes again, as from a collator
        whose rows are all of one length.
        """
        key = bucket_of(packed), kind
        if packed.tree is not None:
            # two trees hardly ever round up to the same sizes
            seen = _least(self._seen, kind, lambda bucket: bucket.holds(packed))
            return key if seen is None else seen
        own = bucket_of(packed, None), kind
        if own == key:
            return key
        self._lengths.add(own[0].tokens)
        if len(self._lengths) > LENGTHS:
            return key
        if self._seen[own]:
            return own
        self._seen[own] += 1
        return key

    def _why_not(self, key: Any, due: bool, others: bool, replayed: int, wait: bool) -> str | None:
        """Return why a bucket's graph is not captured now, or None."""
        if wait:
            return "the optimizer has made no step yet"
        if key in self.given_up:
            return self.given_up[key]
        if self.no_room is not None and key[0].tokens >= self.no_room[0]:
            return self.no_room[1]
        if not due:
            return "a row of about this length was not seen before"
        # without any graph, no replay would pay for the next capture
        if others and self.captures >= MOST + replayed // REPLAYS:
            return "rows are of more sizes than graphs pay for"
        return None


def in_longer(packed: PackedSequence, kind: Any, graphs: Collection[Any]) -> Any:
    """Return the key of the shortest graph that takes a row, with whatever padding, or None."""
    return _least(graphs, kind, lambda bucket: bucket.takes(packed))


def _least(keys: Collection[Any], kind: Any, fits: Callable[[Bucket], bool]) -> Any:
    return min((key for key in keys if key[1] == kind and fits(key[0])), default=None)


def _widened(key: Any, graphs: Collection[Any]) -> Any:
    """Return the key with room for all rows of the graphs of as many tokens: which of these a row
    fits into is not known when it is replayed ahead, see `widest`.
    """
    every = [key[0], *(bucket for bucket, _ in alike(key, graphs))]
    documents, longest = (max(getattr(x, name) for x in every) for name in ("documents", "longest"))
    return replace(key[0], documents=documents, longest=longest), key[1]


def alike(key: Any, graphs: Collection[Any]) -> list[Any]:
    """Return the keys of graphs of as many tokens, whose place the key's takes; none for a tree."""
    (tokens, tree), kind = (key[0].tokens, key[0].tree), key[1]
    found = [each for each in graphs if each[1] == kind and each[0].tokens == tokens]
    return [each for each in found if tree is None and each[0].tree is None]
