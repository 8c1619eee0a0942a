"""Buckets of rows: all rows of a bucket are padded to the same numbers of tokens and documents, so
that their tensors have the same sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_packfree.packing import PackedSequence
from hf_packfree.packing.bounded import filled, on_host
from hf_packfree.packing.opaque import replaced
from hf_packfree.packing.tree import Size, Tree, TreeSizes

STEPS = 16
"""Number of bucket sizes from one power of two to the next: at most 1/16 of a row of that bucket is
padding.
"""
FEWER_STEPS = 4
"""The same number for graphs that rows of many lengths share, until more of their own length came.
"""
STEPS_OF_TREES = 8
"""The same number for a tree's paths, and for each of its levels: at most 1/8 of them is padding.
It is smaller because only operations that mix tokens compute this padding.
"""
FINEST = 16
"""The smallest difference in tokens between two buckets."""
FEWEST_DOCUMENTS = 16
"""The fewest documents of a bucket."""
SHORTEST = 64
"""The smallest step in tokens for a tree's levels and paths: a chunk, which kernels load whole."""


@dataclass(frozen=True, order=True)
class Bucket:
    """The sizes that rows are padded to.

    Attributes:
        tokens: T of the padded row.
        documents: N of the padded row: its documents, segments of padding, and empty ones.
        longest: `max_seqlen` of the padded row.
        tree: the sizes of the rows that operations build from a tree; None: the bucket is of rows
            without a tree.
    """

    tokens: int
    documents: int
    longest: int
    tree: TreeSizes | None = None

    def holds(self, packed: PackedSequence) -> bool:
        """Whether the row fits into the bucket, and at most 1 / `STEPS` of the bucket is
        padding.
        """
        return self.holds_tokens(packed.num_tokens) and self.takes(packed)

    def takes(self, packed: PackedSequence) -> bool:
        """Whether the row fits into the bucket, however much of the bucket is padding."""
        spare = self.tokens - packed.num_tokens
        # at least one of padding, and an empty one
        further = max(1, -(-spare // self.longest)) + 1
        return (
            spare >= 0
            and packed.num_segments + further <= self.documents
            and packed.max_seqlen <= self.longest
            and self._holds_tree(packed.tree, spare)
        )

    def holds_tokens(self, tokens: int) -> bool:
        """Whether a row of so many tokens fits, if its documents do."""
        return 0 <= self.tokens - tokens <= max(FINEST, self.tokens // STEPS)

    def _holds_tree(self, tree: Tree | None, spare: int) -> bool:
        if tree is None or self.tree is None:
            return tree is None and self.tree is None
        sizes, bounds = tree.padded(spare).sizes, self.tree
        of_levels = zip(sizes.levels, bounds.levels, strict=False)
        return (
            len(sizes.levels) == len(bounds.levels)
            and _fits(sizes.paths, bounds.paths, bounds.paths.tokens)
            and all(_fits(size, bound, self.tokens) for size, bound in of_levels)
        )


def _fits(size: Size, bound: Size, tokens: int) -> bool:
    spare = bound.tokens - size.tokens
    fits = 0 <= spare <= max(SHORTEST, tokens // STEPS_OF_TREES)
    return fits and size.documents + 2 <= bound.documents


def bucket_of(packed: PackedSequence, steps: int | None = STEPS) -> Bucket:
    """Return the bucket of a row: its sizes, rounded up; T to one of so many steps from one power
    of two to the next, or with None to the next multiple of `FINEST`.
    """
    tokens = packed.num_tokens
    step = FINEST if steps is None else _step(tokens, steps, FINEST)
    tokens = _up(tokens, step)
    # one more document for this padding, and at least one empty document, with which plans are
    # filled up
    documents = max(FEWEST_DOCUMENTS, 1 << (packed.num_segments + 1).bit_length())
    if packed.tree is not None:
        # `longest` is the whole row, because no operation takes a tree's segments for documents
        return Bucket(tokens, documents, tokens, _bounds(packed.tree, packed.num_tokens, tokens))
    longest = min(tokens, 1 << (max(packed.max_seqlen, step) - 1).bit_length())
    return Bucket(tokens, documents, longest)


def _bounds(tree: Tree, tokens: int, of_bucket: int) -> TreeSizes:
    def rounded(size: Size, tokens: int) -> Size:
        step, documents = _step(tokens, STEPS_OF_TREES, SHORTEST), size.documents + 2
        return Size(_up(size.tokens, step), _up(documents, _step(documents, 4, 4)))

    paths, levels = tree.padded(of_bucket - tokens).sizes
    return TreeSizes(
        rounded(paths, paths.tokens), tuple(rounded(level, of_bucket) for level in levels)
    )


def _step(size: int, steps: int, least: int) -> int:
    return max(least, (1 << (size - 1).bit_length()) // (2 * steps))


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def in_bucket(packed: PackedSequence, bucket: Bucket) -> PackedSequence:
    """Return the record padded to the bucket: its tokens and documents, and in a tree its paths and
    levels.
    """
    row = filled(packed, bucket.tokens, bucket.documents, bucket.longest)
    if packed.tree is None:
        return row
    tree = packed.tree.padded(bucket.tokens - packed.num_tokens, bucket.tree)
    return replaced(row, tree=tree)


def lengthened(row: Tensor, bucket: Bucket, dim: int) -> Tensor:
    """Return a tensor of the row padded with zeros along `dim` to the bucket's tokens."""
    spare = bucket.tokens - row.shape[dim]
    if not spare:
        return row
    sizes = [*row.shape]
    sizes[dim] = spare
    return torch.cat([row, row.new_zeros(sizes)], dim)


def lengthened_inputs(row: Tensor, positions: Tensor, bucket: Bucket) -> tuple[Tensor, Tensor]:
    """Return a row's ids [1, T] or embeddings [1, T, D], and positions [..., 1, T], padded
    likewise.
    """
    return lengthened(row, bucket, 1), lengthened(positions, bucket, positions.ndim - 1)


def cut(row: Tensor, tokens: int) -> Tensor:
    """Return a padded row's first tokens [1, tokens, D]: no view, which FSDP2 warns of where it
    wraps the text model.
    """
    return row if row.shape[1] == tokens else row[:, :tokens].clone()


def in_bucket_on(packed: PackedSequence, bucket: Bucket, device: torch.device) -> PackedSequence:
    """Return `in_bucket`'s record on a device."""
    return in_bucket(on_host(packed), bucket).to(device)


def kind_of(row: Tensor, positions: Tensor) -> Any:
    """Return what, apart from the bucket, decides which graph runs a row of ids or embeddings."""
    return positions.shape[:-1], str(row.dtype), row.requires_grad
