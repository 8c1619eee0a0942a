"""A forward's arguments that describe a tree of shared prefixes: the record itself, or the keywords
of TRL's tree packing. All that are passed must agree.

Shapes: T tokens of the row, N segments, K tokens of all paths together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_packfree.errors import BoundaryConflict, BoundaryError, UnsupportedInput
from hf_packfree.packing.boundaries import integers_of
from hf_packfree.packing.record import Integers, PackedSequence
from hf_packfree.packing.tree import ROOT, Tree

RECORD = "packed_sequence"
_SEGMENTS = "tree_cu_seqlens_q"
"""Integers [N+1], the segments' offsets in the row."""
_KEYS = "tree_kv_index"
"""Integers [K]: the tokens on every segment's path from the root, its own at the end."""
_PATHS = "tree_cu_seqlens_k"
"""Integers [N+1]: the offsets of the segments' paths in `_KEYS`."""
_PARENTS = "tree_segment_parents"
"""Integers [N]; -1 where a segment has no parent."""
_DEPTHS = "tree_segment_depths"
"""Integers [N], 0 at a root."""
_LEVELS = "tree_level_sizes"
"""The number of segments at each depth."""
_LONGEST = {"tree_max_seqlen_q": "a segment", "tree_max_seqlen_k": "a path"}
"""At least the number of tokens of the longest segment, and of the longest path."""
_PLANS = ("tree_n_chunks",)
"""Hints for TRL's kernels, which do not describe the tree."""
KEYWORDS = (_SEGMENTS, _PATHS, _KEYS, _PARENTS, _DEPTHS, _LEVELS, *_LONGEST, *_PLANS)
"""The keywords of TRL 1.16, and those that huggingface/trl#7686 adds."""


def has_tree(arguments: Mapping[str, Any]) -> bool:
    """Whether a forward's arguments describe a tree: a record that has one, or keywords."""
    by_record = getattr(arguments.get(RECORD), "tree", None) is not None
    return by_record or any(arguments.get(name) is not None for name in KEYWORDS)


def take_tree(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Remove the keywords of a tree from a forward's keywords, and return them.

    Raises:
        UnsupportedInput: a keyword that begins with `tree_` is unknown.
    """
    for name, value in kwargs.items():
        if name.startswith("tree_") and name not in KEYWORDS and value is not None:
            raise UnsupportedInput(
                f"found the keyword {name}, which describes a tree in words that are not known; "
                f"wanted those of TRL 1.16, such as {_KEYS}; pass packed_sequence="
                "PackedSequence.from_tree(segment_lengths, parents) instead"
            )
    taken = {name: kwargs.pop(name) for name in KEYWORDS if name in kwargs}
    return {name: value for name, value in taken.items() if value is not None}


def resolve_tree(
    keywords: Mapping[str, Any],
    positions: Tensor | None,
    mask: Any,
    others: list[str],
    shape: tuple[int, int],
    device: torch.device,
) -> PackedSequence:
    """Build the record of a row that is a tree.

    Args:
        keywords: {name: value} of the arguments that describe the tree: `RECORD`, or any of
            `KEYWORDS`.
        positions: the caller's `position_ids`, [S], [1, S], or 3 or 4 such rows; None: positions
            count along the paths.
        mask: the caller's `attention_mask`.
        others: the names of the caller's other arguments that describe documents.
        shape: (B, S), rows and tokens of a row.
        device: of the tokens.

    Raises:
        BoundaryError: a keyword is malformed or missing.
        BoundaryConflict: arguments disagree.
        UnsupportedInput: several rows, padding, or documents described in another way too.
    """
    if shape[0] != 1:
        raise UnsupportedInput(
            f"found a tree of shared prefixes in a batch of {shape[0]} rows; wanted one row; put "
            "the trees one after the other, each with a root of its own"
        )
    _refuse_others(mask, others)
    packed, name = _read(keywords, shape[1])
    if packed.num_tokens != shape[1]:
        raise BoundaryConflict(
            f"found {name} of {packed.num_tokens} tokens for a row of {shape[1]}; wanted one "
            "segment for every token; build both from the same samples"
        )
    packed = packed.to(device)
    if positions is not None and positions is not packed.position_ids():
        _check_positions(positions, packed, name)
    return packed


def _refuse_others(mask: Any, others: list[str]) -> None:
    says_nothing = mask is None or (
        isinstance(mask, Tensor) and mask.ndim == 2 and bool((mask == 1).all())
    )
    if others or not says_nothing:
        raise UnsupportedInput(
            f"found {(*others, 'attention_mask')[0]} with a tree of shared prefixes; wanted the "
            "tree and position_ids alone, and no padding; leave it out"
        )


def _read(keywords: Mapping[str, Any], tokens: int) -> tuple[PackedSequence, str]:
    """Return the record, and the name of the keyword that it was read from."""
    found: PackedSequence | None = keywords.get(RECORD)
    by_keywords = {name: value for name, value in keywords.items() if name != RECORD}
    if not by_keywords:
        assert found is not None
        return found, RECORD
    lengths, parents = _forest(by_keywords, tokens)
    packed = PackedSequence.from_tree(lengths, parents)
    _check_keywords(by_keywords, Tree.of(packed.lengths, parents))
    if found is not None and _segments(found) != _segments(packed):
        raise _disagree(RECORD, _SEGMENTS)
    return packed, _SEGMENTS


def _segments(packed: PackedSequence) -> tuple[Any, ...]:
    return packed.lengths, None if packed.tree is None else packed.tree.parents


def _forest(keywords: Mapping[str, Any], tokens: int) -> tuple[Integers, tuple[int, ...]]:
    """Return the lengths and parents of the segments, from TRL's keywords."""
    if _SEGMENTS not in keywords or not (
        _PARENTS in keywords or {_PATHS, _KEYS} <= keywords.keys()
    ):
        raise BoundaryError(
            f"found {' and '.join(keywords)} without the rest of a tree; wanted {_SEGMENTS} with "
            f"{_KEYS} and {_PATHS}, or with {_PARENTS}; pass them together"
        )
    starts = _offsets(_SEGMENTS, keywords, tokens)
    by_paths = None
    if _PATHS in keywords and _KEYS in keywords:
        keys = _integers(_KEYS, keywords)
        by_paths = _parents_by_paths(starts, keys, _offsets(_PATHS, keywords, len(keys)))
    parents = by_paths
    if _PARENTS in keywords:
        parents = tuple(_integers(_PARENTS, keywords).tolist())
        if by_paths is not None and parents != by_paths:
            raise _disagree(_PARENTS, _KEYS)
    assert parents is not None
    return np.diff(starts), parents


def _parents_by_paths(starts: Integers, keys: Integers, paths: Integers) -> tuple[int, ...]:
    if len(paths) != len(starts):
        raise _disagree(_PATHS, _SEGMENTS)
    found = list[int]()
    for segment, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        path = keys[paths[segment] : paths[segment + 1]]
        before, own = path[: start - end], path[start - end :]
        parent = ROOT
        if len(before):
            parent = int(np.searchsorted(starts, before[-1], side="right")) - 1
        whole = keys[paths[parent] : paths[parent + 1]] if 0 <= parent < segment else before[:0]
        if not np.array_equal(own, np.arange(start, end)) or not np.array_equal(before, whole):
            raise BoundaryError(
                f"found {_KEYS} with a path to segment {segment} that is not another segment's "
                "path and then its own tokens; wanted segments that end where others branch off; "
                "cut them there"
            )
        found.append(parent)
    return tuple(found)


def _check_keywords(keywords: Mapping[str, Any], tree: Tree) -> None:
    """Check the other keywords against the tree."""
    levels = Counter(tree.depths)
    said = {_DEPTHS: list(tree.depths), _LEVELS: [levels[depth] for depth in sorted(levels)]}
    for name, wanted in said.items():
        if name in keywords and _integers(name, keywords).tolist() != wanted:
            raise _disagree(name, _SEGMENTS)
    paths = [before + own for before, own in zip(tree.before, tree.lengths, strict=True)]
    for (name, what), longest in zip(
        _LONGEST.items(), (max(tree.lengths), max(paths)), strict=True
    ):
        if name in keywords and _integers(name, keywords).max() < longest:
            raise BoundaryConflict(
                f"found {name}={keywords[name]} with {what} of {longest} tokens; wanted at least "
                f"{longest}; build it from the same segments"
            )


def _check_positions(given: Tensor, packed: PackedSequence, name: str) -> None:
    wanted = packed.position_ids().to(given.device)[0]
    found = given.detach()
    if found.shape[-1:] != wanted.shape or found[..., 0].numel() not in (1, 3, 4):
        raise BoundaryError(
            f"found position_ids {list(given.shape)} with {name} of {len(wanted)} tokens; wanted "
            "(1, S); build both from the same samples"
        )
    differs = (found.reshape(-1, len(wanted)) != wanted).any(0).nonzero()
    if len(differs):
        token = int(differs[0, 0])
        raise BoundaryConflict(
            f"found position_ids and {name} in disagreement at token {token}: "
            f"{found.reshape(-1, len(wanted))[:, token].tolist()} and {int(wanted[token])}; wanted "
            "positions that count along every path from its root; leave position_ids out"
        )


def _offsets(name: str, keywords: Mapping[str, Any], total: int) -> Integers:
    found = _integers(name, keywords)
    if len(found) < 2 or found[0] != 0 or found[-1] != total or (np.diff(found) < 1).any():
        raise BoundaryError(
            f"found {name} from {found[:1].tolist()} to {found[-1:].tolist()}; wanted offsets that "
            f"start at 0, increase, and end at {total}; take a collator's padding off"
        )
    return found


def _integers(name: str, keywords: Mapping[str, Any]) -> Integers:
    """Return a keyword's integers, of one dimension, as int64 on the host."""
    given = integers_of(keywords[name])
    if given is None or given.ndim > 1 or given.numel() == 0:
        raise BoundaryError(
            f"found {name} as {type(keywords[name]).__name__}, no row of integers; wanted what TRL "
            "passes there; pass packed_sequence=PackedSequence.from_tree(segment_lengths, parents) "
            "instead"
        )
    return given.reshape(-1).numpy()


def _disagree(one: str, other: str) -> BoundaryConflict:
    return BoundaryConflict(
        f"found {one} and {other} that describe different trees; wanted the same segments and "
        "parents in both; build them from the same samples, or pass one of them"
    )
