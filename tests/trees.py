"""Trees of shared prefixes for the tests: drawn, cut into the samples they hold, and run along
every sample alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from hypothesis import strategies as st

from hf_packfree.packing import PackedSequence
from tests.support import Batch, documents


@dataclass(frozen=True)
class Forest:
    """Segments, the parent of each (None: a root), and the segments that samples end with."""

    lengths: tuple[int, ...]
    parents: tuple[int | None, ...]
    ends: tuple[int, ...]

    @property
    def record(self) -> PackedSequence:
        return PackedSequence.from_tree(self.lengths, self.parents)

    def tokens(self, segment: int | None) -> torch.Tensor:
        """Return the row's tokens from the root to the end of a segment."""
        if segment is None:
            return torch.arange(0)
        end = list(accumulate(self.lengths))[segment]
        own = torch.arange(end - self.lengths[segment], end)
        return torch.cat([self.tokens(self.parents[segment]), own])

    @property
    def samples(self) -> list[torch.Tensor]:
        """The tokens of every sample."""
        return [self.tokens(end) for end in self.ends]

    @property
    def depth(self) -> int:
        """The number of levels."""
        return max(self.record.tree.depths) + 1 if self.record.tree else 1


def forest(lengths, parents, *, inner=()) -> Forest:
    """Return the forest whose samples end at its leaves, and inside at `inner`."""
    leaves = [segment for segment in range(len(parents)) if segment not in parents]
    return Forest(tuple(lengths), tuple(parents), tuple(sorted([*leaves, *inner])))


GROUP = forest((37, 5, 64, 1, 30), (None, 0, 0, 0, 0))
"""A prompt with four answers."""
TURNS = forest(
    (20, 70, 2, 65, 1, 3, 40, 1, 129, 9, 5),
    (None, 0, 1, 1, 3, 0, 5, 6, 5, None, None),
    inner=(1, 5),
)
"""Four levels, a branch shorter than the convolution's window behind another, samples that end
inside, a second and a third root.
"""
CHAIN = forest((3, 1, 1, 1, 2, 70), (None, 0, 1, 2, 3, 4), inner=(0, 1, 2, 3, 4))
"""Six levels of one sample each, so short that a window reaches over several."""


@st.composite
def forests(draw, tokens: int = 600) -> Forest:
    """Depth to 6, branches to 9, up to three roots, segments of 1 to 300 tokens, about `tokens`
    together; laid depth first.
    """
    lengths, parents = list[int](), list[int | None]()

    def grow(parent: int | None, depth: int) -> None:
        room = tokens - sum(lengths)
        if parent is not None and room < 1:
            return
        segment = len(lengths)
        longest = draw(st.sampled_from([1, 3, 5, 64, 300]))
        lengths.append(draw(st.integers(1, min(longest, max(room, 1)))))
        parents.append(parent)
        children = draw(st.sampled_from([0, 1, 2, 3, 9])) if depth < 6 else 0
        for _ in range(children):
            grow(segment, depth + 1)

    for _ in range(draw(st.integers(1, 3))):
        grow(None, 1)
    inner = [one for one in range(len(parents)) if one in parents]
    return forest(lengths, parents, inner=draw(st.sets(st.sampled_from(inner))) if inner else ())


def batch_of(tree: Forest, **inputs) -> Batch:
    """Return the samples of random tokens, and one row with what they share once."""
    ids = torch.cat(documents([sum(tree.lengths)]))
    given = {"input_ids": ids[None], "packed_sequence": tree.record} | inputs
    return Batch([ids[tokens] for tokens in tree.samples], given, [(0, s) for s in tree.samples])
