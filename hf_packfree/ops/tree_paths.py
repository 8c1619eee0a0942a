"""Rows of shared prefixes (trees, see `hf_packfree.packing.tree`) on operations that take rows of
documents only: the tokens of its prefixes that a segment reads are repeated in front of it, in a
longer row.

With a bounded record (CUDA graphs), the longer row is filled up with tokens whose outputs are not
read and whose gradients are zero.

Attention and the convolution make one call for the whole row, the delta rule one for each depth of
the tree. The gradient of a shared prefix is a sum over its branches, in fp32 (fp64 if the input
is).

Shapes: T tokens of the row, P tokens of the longer row, N segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.packing import PackedSequence, uncompiled
from hf_packfree.packing.bounded import filled
from hf_packfree.packing.opaque import replaced
from hf_packfree.packing.record import Integers
from hf_packfree.packing.tree import ROOT, Size, Tree


class Longer(NamedTuple):
    """The longer row of documents that is gathered from a row of segments.

    Attributes:
        record: of the longer row's documents.
        tokens: int64 [P], for each place of the longer row the token of the row that is gathered
            there.
        own: int64 [T], for each token of the row the one place of the longer row whose output is
            read.
        others: int64 [P - T], the other places of the longer row, which repeat tokens.
        shared: int64 [R], the tokens that `others` repeat, each once; where the record is bounded
            also other tokens, so that R is min(T, P - T).
        numbers: int64 [P - T], for each of `others` the index into `shared` of its token.
    """

    record: PackedSequence
    tokens: Tensor
    own: Tensor
    others: Tensor
    shared: Tensor
    numbers: Tensor


class TreeLevel(NamedTuple):
    """The segments of one depth.

    Attributes:
        record: of these segments.
        parents: int64, for each segment its parent's number in the level above; None for roots.
    """

    record: PackedSequence
    parents: Tensor | None


class Levels(NamedTuple):
    """The row's segments by depth.

    Attributes:
        levels: one for each depth, roots first.
        order: int64 [T], the row's tokens sorted by level; None if the row is sorted so already.
        back: int64 [T], the inverse of `order`.
    """

    levels: tuple[TreeLevel, ...]
    order: Tensor | None
    back: Tensor | None


def plan_paths(packed: PackedSequence) -> Longer:
    """Make a document of every path from a root to a leaf; the output of a segment on several paths
    is read from the first path.
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
    tree, device, spans = _tree(packed), packed.cu_seqlens.device, _tree(packed).spans()
    tokens, levels, number = list[Integers](), list[TreeLevel](), dict[int, int]()
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
        levels.append(TreeLevel(record, _to(parents, device) if depth else None))
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
    """Let every token attend to itself and the tokens in front of it on its path.

    Args:
        q, k, v, packed: as for `hf_packfree.ops.attention.attention`, with a tree.
        attend: the attention on a row of documents, with the same arguments.
    """
    plan = packed.cached(plan_paths)
    # outputs of repeated queries are not read, so their gradients need no sum
    (q,) = _Take.apply(plan.tokens, plan.own, q)
    k, v = _Share.apply(plan, k, v)
    (out,) = _Read.apply(plan.own, attend(q, k, v, plan.record))
    return out  # type: ignore[no-any-return]


@uncompiled
def convolve_along_paths(
    x: Tensor, packed: PackedSequence, taps: int, convolve: Callable[..., Any]
) -> Any:
    """Convolve every token with the tokens in front of it on its path.

    Args:
        x: [1, T, C].
        packed: the record, with a tree.
        taps: of the filter.
        convolve: the convolution on a row of documents: takes `x` and `packed`, returns one tensor
            [1, T, ...] or several.
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
    """Run the delta rule level by level: every segment begins with its parent's final state.

    Args:
        inputs: each [1, T, ...].
        packed: the record, with a tree.
        run: takes a level's inputs, their record, and an initial state for each document or None;
            returns the output [1, T, ...] and the final states.
    """
    plan = packed.cached(plan_levels)
    sizes = [level.record.num_tokens for level in plan.levels]
    ordered = inputs if plan.order is None else _Take.apply(plan.order, plan.back, *inputs)
    parts = zip(plan.levels, *(x.split(sizes, 1) for x in ordered), strict=True)
    outs, states = list[Tensor](), torch.empty(0)
    for level, *of_level in parts:
        # the backward of `index_select` sums the gradients of a parent's branches, in the dtype of
        # states
        begin = None if level.parents is None else states.index_select(0, level.parents)
        out, states = run(*of_level, level.record, begin)
        outs.append(out)
    whole = torch.cat(outs, 1)
    return whole if plan.back is None else _Read.apply(plan.back, whole)[0]


def gather(row: Tensor, tokens: Tensor) -> Tensor:
    """Return the given tokens of a row [1, T, ...], as [1, P, ...]; the gradients of a token that
    is taken several times are added in fp32 (fp64 if the row is).
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
    """Gathers tokens of rows; a token's gradient is only that at its place in `own`, since outputs
    at other places are not read.
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
    """Reads some places of rows, none twice; the gradient is zero elsewhere."""

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
    """`gather` for the longer row of a plan: backward sums the gradients of repeated tokens only,
    and copies the others.
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
    """Return the longer row of some documents: each is a list of consecutive segments of a path,
    with at most `reach` tokens in front of the first.
    """
    tree, device = _tree(packed), packed.cu_seqlens.device
    spans, own = tree.spans(), np.full(packed.num_tokens, -1)
    tokens, lengths, unread, end = list[Any](), list[int](), list[int](), 0
    for segments in documents:
        parts = _in_front(tree, spans, segments[0], reach)
        before = sum(map(len, parts))
        end += before
        for segment in segments:
            span = spans[segment]
            parts.append(span)
            # a segment's output is read from the first document that has it
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
    """Return `others`, `shared` and `numbers` of `Longer`; where `bounded`, `shared` is filled up
    to its largest possible size.
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
    """Return the record of documents of these lengths, gathered from the row's `tokens`, and the
    tokens, both filled up to the bounds.
    """
    record = PackedSequence.from_lengths(lengths, device=packed.cu_seqlens.device)
    if bounds is None:
        return record, tokens
    # filled up with tokens in turn: many gradients of a single token would be added one by one
    more = np.arange(bounds.tokens - len(tokens)) % packed.num_tokens
    return filled(record, *bounds, longest=bounds.tokens), np.concatenate([tokens, more])


def _in_front(tree: Tree, spans: list[Any], segment: int, count: int) -> list[Any]:
    """Return the last `count` tokens in front of a segment on its path, fewer if it has fewer, in
    one part per segment.
    """
    parts, segment = list[Any](), tree.parents[segment]
    while count and segment != ROOT:
        parts.insert(0, spans[segment][-count:])
        count, segment = count - len(parts[0]), tree.parents[segment]
    return parts


def _tree(packed: PackedSequence) -> Tree:
    assert packed.tree is not None
    return packed.tree


def _to(table: Tensor, device: torch.device) -> Tensor:
    return table.to(device, non_blocking=True)
