"""A forest of shared prefixes: segments continue other segments, so that a prefix that samples
share is in the row once.

Shapes: T tokens of the row, N segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_packfree.errors import BoundaryError, UnsupportedInput

ROOT = -1
"""The parent of a root."""


class Size(NamedTuple):
    """The size of a row: its number of tokens and of documents."""

    tokens: int
    documents: int


class TreeSizes(NamedTuple):
    """Sizes of the rows that operations build from a tree: one of all its paths, and one per depth
    of the segments there.
    """

    paths: Size
    levels: tuple[Size, ...]


@dataclass(frozen=True, eq=False)
class Tree:
    """The parent of each segment of a row; host integers alone.

    Attributes:
        lengths: N numbers of tokens, in row order.
        parents: N numbers of segments, each before its children; `ROOT` where a path begins.
        before: N, the tokens in front of each segment on its path from the root.
        depths: N, the number of segments in front of each segment on its path.
        bounds: sizes to which plans are padded, so that other trees share them, see
            `PackedSequence.bounded`; None: plans have this tree's own sizes.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    before: tuple[int, ...]
    depths: tuple[int, ...]
    bounds: TreeSizes | None = None

    @classmethod
    def of(cls, lengths: Sequence[int], parents: Sequence[int | None] | Tensor) -> Tree:
        """Build the tree from the segments' lengths and parents.

        Raises:
            BoundaryError: a parent is not one of the segments before its child.
        """
        found = _parents(parents, len(lengths))
        before, depths = list[int](), list[int]()
        for parent in found:
            before.append(0 if parent == ROOT else before[parent] + lengths[parent])
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return cls(tuple(lengths), found, tuple(before), tuple(depths))

    @property
    def is_flat(self) -> bool:
        """Whether nothing is shared: every segment is a root."""
        return not any(self.depths)

    @property
    def starts(self) -> list[int]:
        """N offsets of segments in the row, in tokens."""
        return [0, *accumulate(self.lengths)][:-1]

    @property
    def leaves(self) -> list[int]:
        """The segments without children, in row order."""
        inner = set(self.parents)
        return [segment for segment in range(len(self.parents)) if segment not in inner]

    @property
    def sizes(self) -> TreeSizes:
        """The sizes of the tree's own paths and levels, without bounds."""
        paths = [self.before[leaf] + self.lengths[leaf] for leaf in self.leaves]
        levels = [[0, 0] for _ in range(max(self.depths) + 1)]
        for depth, length in zip(self.depths, self.lengths, strict=True):
            levels[depth][0] += length
            levels[depth][1] += 1
        return TreeSizes(Size(sum(paths), len(paths)), tuple(Size(*level) for level in levels))

    def padded(self, spare: int, bounds: TreeSizes | None = None) -> Tree:
        """Return the tree with one more root of `spare` tokens at its end, which is padding;
        without that where `spare` is 0.
        """
        lengths, parents = self.lengths, self.parents
        if spare:
            lengths, parents = (*lengths, spare), (*parents, ROOT)
        return replace(Tree.of(lengths, parents), bounds=bounds)

    def upwards(self, segment: int) -> Iterator[int]:
        """Yield a segment, its parent, and so on to the root."""
        while segment != ROOT:
            yield segment
            segment = self.parents[segment]

    def path(self, segment: int) -> list[int]:
        """Return the segments on the path from the root to `segment`, which is the last."""
        return list(self.upwards(segment))[::-1]

    def spans(self) -> list[NDArray[np.int64]]:
        """Return N arrays: where each segment's tokens are in the row."""
        pairs = zip(self.starts, self.lengths, strict=True)
        return [np.arange(start, start + length) for start, length in pairs]

    def samples(self) -> list[Tensor]:
        """Return int64 [n] on the host for each leaf: where the tokens of its path are in the
        row.
        """
        spans = self.spans()
        paths = map(self.path, self.leaves)
        return [torch.from_numpy(np.concatenate([spans[one] for one in path])) for path in paths]

    def sees(self) -> Tensor:
        """Return bool [N, N] on the host: True at [i, j] if segment j is on the path from the root
        to segment i.
        """
        seen = torch.eye(len(self.parents), dtype=torch.bool, device="cpu")
        for segment, parent in enumerate(self.parents):
            if parent != ROOT:
                seen[segment] |= seen[parent]
        return seen

    def predecessors(self) -> Tensor:
        """Return int64 [T] on the host: for each token the token before it on its path; -1 for the
        first token of a path.
        """
        found = np.arange(-1, sum(self.lengths) - 1)
        starts = self.starts
        for start, parent in zip(starts, self.parents, strict=True):
            found[start] = -1 if parent == ROOT else starts[parent] + self.lengths[parent] - 1
        return torch.from_numpy(found)


def refuse_tree(packed: Any, where: str) -> None:
    """Refuse a record with a tree.

    Args:
        packed: a record, or any object that stands for none.
        where: where a tree is not supported, in words that follow "a tree of shared prefixes" in
            the message.

    Raises:
        UnsupportedInput: the record has a tree.
    """
    if getattr(packed, "tree", None) is not None:
        raise UnsupportedInput(
            f"found a tree of shared prefixes {where}; wanted documents one after the other; pass "
            "every path from the root as a document of its own"
        )


def _parents(given: Any, segments: int) -> tuple[int, ...]:
    listed = given.tolist() if isinstance(given, (Tensor, np.ndarray)) else list(given)
    found = tuple(ROOT if parent is None else parent for parent in listed)
    whole = all(type(parent) is int for parent in found)
    if len(found) != segments or not whole:
        raise BoundaryError(
            f"found parents {_short(listed)} of {segments} segments; wanted one whole number for "
            "each segment, the segment that it goes on from, or None; pass parents as long as "
            "segment_lengths"
        )
    for segment, parent in enumerate(found):
        if not ROOT <= parent < segment:
            raise BoundaryError(
                f"found {parent} as the parent of segment {segment}; wanted a segment before it, "
                "or None for a root; lay the tree out depth first"
            )
    return found


def _short(values: Sequence[Any]) -> str:
    return f"[{', '.join(map(str, values[:8]))}{', ...' if len(values) > 8 else ''}]"
