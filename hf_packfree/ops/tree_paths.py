"""Rows of shared prefixes (trees, see `hf_packfree.packing.tree`) on operations that know documents
only: the tokens that a segment reads of its prefixes are gathered in front of it.

With a bounded record (CUDA graphs), the gathered row is filled up with tokens whose outputs nobody
reads and whose gradients are zero.

Attention and the convolution are one call for the whole row, the delta rule is one for each level
of depth. The gradient of a shared prefix is a sum over its branches, in fp32 (fp64 if the input
is).

Shapes: T tokens of the row, P of the longer row that is gathered, N segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from hf_packfree.ops.operation import once_differentiable
from hf_packfree.packing import PackedSequence, uncompiled
from hf_packfree.packing.bounded import filled
from hf_packfree.packing.opaque import replaced
from hf_packfree.packing.record import Integers
from hf_packfree.packing.tree import ROOT, Size, Tree


class Longer(NamedTuple):
    """A row of documents made of a row of segments.

    Attributes:
        record: of its documents.
        tokens: int64 [P], the row's token at each place of it.
        own: int64 [T], where each of the row's tokens finds what is computed for it.
        others: int64 [P - T], the other places.
        shared: int64 [R], the row's tokens at these other places, each once; where the record is
            bounded more of them, so that R is min(T, P - T).
        numbers: int64 [P - T], which of the shared ones is at each of these places.
    """

    record: PackedSequence
    tokens: Tensor
    own: Tensor
    others: Tensor
    shared: Tensor
    numbers: Tensor


class Level(NamedTuple):
    """The segments of one depth.

    Attributes:
        record: of these segments.
        parents: int64, the number of each one's parent in the level above; None of roots.
    """

    record: PackedSequence
    parents: Tensor | None


class Levels(NamedTuple):
    """The row's segments by depth.

    Attributes:
        levels: from the roots on.
        order: int64 [T], the row's tokens in that order; None: that of the row.
        back: int64 [T], the places of the row's tokens there.
    """

    levels: tuple[Level, ...]
    order: Tensor | None
    back: Tensor | None


def plan_paths(packed: PackedSequence) -> Longer:
    """Make a document of every path from a root to a leaf; of a segment on several paths, the
    output is read from the first.
    """
    tree = _tree(packed)
    bounds = None if tree.bounds is None else tree.bounds.paths
    return _longer(packed, list(map(tree.path, tree.leaves)), bounds)


def plan_windows(packed: PackedSequence, reach: int) -> Longer:
    """Make a document of every segment and at most `reach` tokens in front of it on its path."""
    tree = _tree(packed)
    bounds = None
    if tree.bounds is not None:
        # the row's empty documents have no window, and there is one more at least
        segments = packed.num_segments
        bounds = Size(packed.num_tokens + reach * segments, segments + 1)
    return _longer(packed, [[segment] for segment in range(len(tree.parents))], bounds, reach)


def plan_levels(packed: PackedSequence) -> Levels:
    """Sort the segments by depth."""
    tree, device, spans = _tree(packed), packed.cu_seqlens.device, _spans(_tree(packed))
    tokens, levels, number = list[Integers](), list[Level](), dict[int, int]()
    back, end = np.empty(packed.num_tokens, dtype=np.int64), 0
    for depth in range(max(tree.depths) + 1):
        members = [segment for segment, found in enumerate(tree.depths) if found == depth]
        own = np.concatenate([spans[segment] for segment in members])
        back[own] = end + np.arange(len(own))
        bounds = None if tree.bounds is None else tree.bounds.levels[depth]
        lengths = [tree.lengths[segment] for segment in members]
        record, own = _row(packed, lengths, own, bounds)
        parents = torch.zeros(record.num_segments, dtype=torch.int64, device="cpu")
        parents[: len(members)] = torch.tensor(
            [number.get(tree.parents[one], 0) for one in members]
        )
        number = {segment: place for place, segment in enumerate(members)}
        levels.append(Level(record, _to(parents, device) if depth else None))
        tokens.append(own)
        end += len(own)
    order = np.concatenate(tokens)
    if tree.bounds is None and bool((np.diff(order) == 1).all()):
        return Levels(tuple(levels), None, None)
    return Levels(tuple(levels), *(_to(torch.from_numpy(one), device) for one in (order, back)))


@uncompiled
def attend_along_paths(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedSequence, attend: Callable[..., Tensor]
) -> Tensor:
    """Attend with every token to those in front of it on its path.

    Args:
        q, k, v, packed: of `hf_packfree.ops.attention.attention`, with a tree.
        attend: takes them for a row of documents.
    """
    plan = packed.cached(plan_paths)
    # what a query gives where it is repeated, nobody reads
    (q,) = _Take.apply(plan.tokens, plan.own, q)
    k, v = _Share.apply(plan, k, v)
    (out,) = _Read.apply(plan.own, attend(q, k, v, plan.record))
    return out  # type: ignore[no-any-return]


@uncompiled
def convolve_along_paths(
    x: Tensor, packed: PackedSequence, taps: int, convolve: Callable[..., Any]
) -> Any:
    """Convolve every token with those in front of it on its path.

    Args:
        x: [1, T, C].
        packed: the record, with a tree.
        taps: of the filter.
        convolve: takes `x` and `packed`, and returns a tensor [1, T, ...] or several.
    """
    plan = packed.cached(plan_windows, taps - 1)
    (longer,) = _Share.apply(plan, x)
    found = convolve(x=longer, packed=plan.record)
    own = _Read.apply(plan.own, *((found,) if isinstance(found, Tensor) else found))
    return own[0] if isinstance(found, Tensor) else own


@uncompiled
def delta_rule_along_paths(
    inputs: Sequence[Tensor], packed: PackedSequence, run: Callable[..., tuple[Tensor, Tensor]]
) -> Tensor:
    """Let every segment begin with the state that its parent leaves.

    Args:
        inputs: each [1, T, ...].
        packed: the record, with a tree.
        run: takes inputs, their record, and a state for each of its documents or None; returns
            their output [1, T, ...] and the states that they leave.
    """
    plan = packed.cached(plan_levels)
    sizes = [level.record.num_tokens for level in plan.levels]
    ordered = inputs if plan.order is None else _Take.apply(plan.order, plan.back, *inputs)
    parts = zip(plan.levels, *(x.split(sizes, 1) for x in ordered), strict=True)
    outs, states = list[Tensor](), torch.empty(0)
    for level, *of_level in parts:
        # whose gradient sums over the branches, in the dtype of states
        begin = None if level.parents is None else states.index_select(0, level.parents)
        out, states = run(*of_level, level.record, begin)
        outs.append(out)
    whole = torch.cat(outs, 1)
    return whole if plan.back is None else _Read.apply(plan.back, whole)[0]


def gather(row: Tensor, tokens: Tensor) -> Tensor:
    """Return a row's tokens, [1, P, ...] of [1, T, ...]; the gradients of one that is taken
    several times are added in fp32 (fp64 if the row is).
    """
    return _Gather.apply(row, tokens)  # type: ignore[no-any-return]


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, row: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.count = row.shape[1]
        return row.index_select(1, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        (tokens,) = ctx.saved_tensors
        dtype = torch.promote_types(d_out.dtype, torch.float32)
        total = d_out.new_zeros((1, ctx.count, *d_out.shape[2:]), dtype=dtype)
        return total.index_add_(1, tokens, d_out.to(dtype)).to(d_out.dtype), None


class _Take(Function):
    """Gathers tokens of rows; a token's gradient is that of its place in `own`, the only one whose
    output is read.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, own: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(own)
        return tuple(row.index_select(1, tokens) for row in rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outs: Tensor) -> tuple[Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        return None, None, *(d_out.index_select(1, own) for d_out in d_outs)


class _Read(Function):
    """Reads some places of rows, none twice; the gradient of all others is zero."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(places)
        ctx.count = rows[0].shape[1]
        return tuple(row.index_select(1, places) for row in rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outs: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        rows = (d_out.new_zeros((1, ctx.count, *d_out.shape[2:])) for d_out in d_outs)
        pairs = zip(rows, d_outs, strict=True)
        return None, *(row.index_copy_(1, places, d_out) for row, d_out in pairs)


class _Share(Function):
    """Rows gathered to a longer one, as by `gather`; backward adds up only the gradients of shared
    tokens, and copies the others.
    """

    @staticmethod
    def forward(ctx: Any, plan: Longer, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.plan = plan
        return tuple(row.index_select(1, plan.tokens) for row in rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outs: Tensor) -> tuple[Tensor | None, ...]:
        plan: Longer = ctx.plan
        found = [d_out.index_select(1, plan.own) for d_out in d_outs]
        for d_row, d_out in zip(found, d_outs, strict=True):
            dtype = torch.promote_types(d_out.dtype, torch.float32)
            total = d_row.index_select(1, plan.shared).to(dtype)
            total.index_add_(1, plan.numbers, d_out.index_select(1, plan.others).to(dtype))
            d_row.index_copy_(1, plan.shared, total.to(d_row.dtype))
        return None, *found


def _longer(
    packed: PackedSequence, documents: list[list[int]], bounds: Size | None, reach: int = 0
) -> Longer:
    """Return the row of some documents, each some segments of a path in order, with at most
    `reach` tokens in front of the first of them.
    """
    tree, device = _tree(packed), packed.cu_seqlens.device
    spans, own = _spans(tree), np.full(packed.num_tokens, -1)
    tokens, lengths, unread, end = list[Any](), list[int](), list[int](), 0
    for segments in documents:
        parts = _in_front(tree, spans, segments[0], reach)
        before = sum(map(len, parts))
        end += before
        for segment in segments:
            span = spans[segment]
            parts.append(span)
            # of the first document that has it
            if own[span[0]] < 0:
                own[span] = end + np.arange(len(span))
            else:
                before += len(span)
            end += len(span)
        tokens += parts
        lengths.append(sum(map(len, parts)))
        unread.append(before)
    record, found = _row(packed, lengths, np.concatenate(tokens), bounds)
    record = replaced(record, unread=tuple(unread))
    plan = found, own, *plan_shared(found, own, bounds is not None)
    return Longer(record, *(_to(torch.from_numpy(one), device) for one in plan))


def plan_shared(
    tokens: Integers, own: Integers, bounded: bool
) -> tuple[Integers, Integers, Integers]:
    """Return `others`, `shared` and `numbers` of `Longer`; where `bounded`, `shared` has the
    largest size that it can have.
    """
    is_own, is_shared = np.zeros(len(tokens), dtype=bool), np.zeros(len(own), dtype=bool)
    is_own[own] = True
    others = np.flatnonzero(~is_own)
    is_shared[tokens[others]] = True
    if bounded:
        rest = np.flatnonzero(~is_shared)
        is_shared[rest[: len(others) - int(is_shared.sum())]] = True
    numbers = np.cumsum(is_shared) - 1
    return others, np.flatnonzero(is_shared), numbers[tokens[others]]


def _row(
    packed: PackedSequence, lengths: list[int], tokens: Integers, bounds: Size | None
) -> tuple[PackedSequence, Integers]:
    """Return the record of documents made of some tokens of the row, and these tokens, filled up
    to the bounds.
    """
    record = PackedSequence.from_lengths(lengths, device=packed.cu_seqlens.device)
    if bounds is None:
        return record, tokens
    # one after the other: gradients of one token would be added one by one
    more = np.arange(bounds.tokens - len(tokens)) % packed.num_tokens
    return filled(record, *bounds, longest=bounds.tokens), np.concatenate([tokens, more])


def _in_front(tree: Tree, spans: list[Any], segment: int, count: int) -> list[Any]:
    """Return the last `count` tokens in front of a segment on its path, or fewer, in parts."""
    parts, segment = list[Any](), tree.parents[segment]
    while count and segment != ROOT:
        parts.insert(0, spans[segment][-count:])
        count, segment = count - len(parts[0]), tree.parents[segment]
    return parts


def _spans(tree: Tree) -> list[Any]:
    """Return the tokens of every segment, integers each."""
    return [
        np.arange(start, start + length)
        for start, length in zip(tree.starts, tree.lengths, strict=True)
    ]


def _tree(packed: PackedSequence) -> Tree:
    assert packed.tree is not None
    return packed.tree


def _to(table: Tensor, device: torch.device) -> Tensor:
    return table.to(device, non_blocking=True)


__all__ = [
    "attend_along_paths",
    "convolve_along_paths",
    "delta_rule_along_paths",
    "gather",
]
