"""The gated delta rule over a sharded row, by exchange of heads or of states.

A shard maps the recurrent state before it to the state after it by an affine map, S' = M S + B, and
the gradient of the state after it to that of the state before it by dS = M^T dS' + C. Segments of
long documents within a shard do so too, see `hf_packfree.ops.delta_rule.segments`. In the forward
pass each rank sends [M, B] of its last document, and in the backward pass [M, C] of its first
document, whatever the documents' lengths; if no document is on several ranks, ranks send nothing. M
is needed only if a shard is inside one document; otherwise zeros are sent.

Shapes: T tokens of the whole row, W ranks, t = T / W, N segments of the shard, H key heads, HV
value heads, K and V their sizes, C = 2 H K + HV V.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.ops.delta_rule.flash_qla_segments import parallel_segments
from hf_packfree.ops.delta_rule.reference import rounded_l2norm
from hf_packfree.ops.delta_rule.segments import Scans, Segments, fold, plan_segments
from hf_packfree.packing import PackedSequence, shard_of, uncompiled
from hf_packfree.parallel.collectives import Pending, heads_to_tokens, send_heads, start_gather


@uncompiled
def delta_rule_by_heads(
    backend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    packed: PackedSequence,
    qk_l2norm: bool,
) -> Tensor:
    """Run the delta rule with H / W key heads on each rank, and the value heads that read these,
    over all tokens; W divides H. For args and returns, see `delta_rule_by_states`.
    """
    shard, sizes = shard_of(packed), (q.shape[3], k.shape[3], v.shape[3])
    parts = [x[0].flatten(1) for x in (q, k, v)]
    mixed, g, beta = exchange_heads(parts, g, beta, packed)
    shares = mixed.split([part.shape[1] // shard.world for part in parts], -1)
    # side by side they had one dtype, the widest of the three
    heads = (
        share.unflatten(-1, (-1, size)).to(x.dtype)
        for share, size, x in zip(shares, sizes, (q, k, v), strict=True)
    )
    out = backend.running(shard.row)(*heads, g, beta, shard.row, qk_l2norm)
    return heads_to_tokens(out[0], shard.group)[None]


def exchange_heads(
    parts: Iterable[Tensor], g: Tensor, beta: Tensor, packed: PackedSequence
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all tokens of this rank's heads: q, k and v concatenated, [1, T, C / W], g and beta
    [1, T, HV / W].

    Args:
        parts: q, k and v, [t, H K], [t, H K] and [t, HV V], before or after the convolution.
        g, beta: [1, t, HV].
        packed: the record of the shard.
    """
    group = shard_of(packed).group
    # g and beta are sent while q, k and v are reordered
    sent = send_heads([torch.stack([g[0], beta[0].to(g.dtype)], 2)], group)
    mixed = send_heads(parts, group).receive().flatten(0, 1)
    gates = sent.receive().flatten(0, 1)
    return mixed[None], gates[None, ..., 0], gates[None, ..., 1].to(beta.dtype)


@uncompiled
def delta_rule_by_states(
    backend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    packed: PackedSequence,
    qk_l2norm: bool,
) -> Tensor:
    """Run the delta rule on this rank's tokens, for any number of ranks.

    Args:
        backend: a `DeltaRuleBackend` with `scans`.
        q, k, v, g, beta, qk_l2norm: see `hf_packfree.ops.delta_rule.gated_delta_rule`, for t
            tokens.
        packed: the record of the shard.

    Returns:
        [1, t, HV, V].
    """
    if qk_l2norm:
        q, k = map(rounded_l2norm, (q, k))
    segments = packed.cached(_segments, _parallel_segments(v, backend))
    return _Rule.apply(q, k, v, g, beta, packed, segments, backend.scans)  # type: ignore[no-any-return]


def _parallel_segments(v: Tensor, backend: Any) -> int:
    """Return how many segments the device scans in parallel; 0 if documents are not cut into
    segments.
    """
    cuts = backend.long is not None and backend.long.takes(v.device, {})
    return parallel_segments(v, v.shape[2]) if cuts else 0


def _segments(packed: PackedSequence, parallel: int) -> Segments:
    """Return the segments of a shard's documents: long documents are cut as on one device; with
    `parallel` 0, or no long documents, each document is one segment.
    """
    shard = shard_of(packed)
    found = plan_segments(packed, parallel) if parallel else None
    found = found or Segments.of(packed, [[length] for length in packed.lengths])
    return found.continued(bool(shard.history(shard.rank)), shard.goes_on(shard.rank))


class _Rule(Function):
    """The delta rule with one exchange in forward and one in backward, in which every rank takes
    part; documents that do not wait for the exchange are scanned meanwhile.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        packed: PackedSequence,
        segments: Segments,
        scans: Scans,
    ) -> Tensor:
        shard, saved = shard_of(packed), scans.prepare(q, k, v, g, beta, segments)
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        state = q.new_zeros(v.shape[2], q.shape[3], v.shape[3], dtype=dtype)
        inside = state.new_zeros(v.shape[2], q.shape[3], q.shape[3])
        transition, addend = (
            scans.summarize(saved, segments)
            if segments.chunks_cpu[0].any()
            else (inside[None], state[None])
        )
        sent: Any = None
        if shard.is_cut:
            left, last = state, segments.of_last()
            if shard.goes_on(shard.rank):
                left = _through(transition[last], addend[last], packed)
                if shard.history(shard.rank) and packed.num_segments == 1:
                    inside = _product(transition[last], packed)
            sent = _send(inside, left, packed)
        waits = shard.history(shard.rank) > 0
        before, (*early, late) = (
            _states(state, packed, 0),
            _turns(packed, segments, 0 if waits else None),
        )
        outs = [
            (scans.walk(turn.of(saved), before[turn.documents], turn.segments),) for turn in early
        ]
        if waits:
            state = _along(sent, slice(shard.before().start, shard.rank + 1), packed)[-1]
            before[0] = state
        if segments.are_cut(packed):
            before = fold(transition, addend, before, segments.firsts)
        outs.append((scans.walk(late.of(saved), before[late.documents], late.segments),))
        if sent is not None and not waits:
            # keeps the exchange's tensors alive until it is done; the result is not needed
            sent.wait()
        ctx.save_for_backward(
            *saved, inside, *(transition, before) if segments.are_cut(packed) else (None, state)
        )
        ctx.plan = packed, segments, scans
        return _joined(reversed(outs))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        *saved, inside, transition, before = ctx.saved_tensors
        packed, segments, scans = ctx.plan
        shard, d_out = shard_of(packed), d_out.contiguous()
        if not segments.are_cut(packed):
            before = _states(before, packed, 0)
        d_state, first = torch.zeros_like(before[0]), segments.of_first()
        addend = (
            scans.summarize_gradient(saved, d_out, segments)
            if segments.chunks_cpu[1].any()
            else d_state[None]
        )
        sent: Any = None
        if shard.is_cut:
            left = d_state
            if shard.history(shard.rank):
                left = _through(
                    None if transition is None else transition[first],
                    addend[first],
                    packed,
                    reverse=True,
                )
            sent = _send(inside, left, packed)
        waits = shard.goes_on(shard.rank)
        d_after, (*early, late) = (
            _states(d_state, packed, -1),
            _turns(packed, segments, -1 if waits else None),
        )
        found = [_walk_back(scans, turn, saved, before, d_out, d_after) for turn in early]
        if waits:
            d_after[-1] = _along(
                sent, slice(shard.rank, shard.after().start + 1), packed, reverse=True
            )[0]
        if segments.are_cut(packed):
            d_after = fold(transition, addend, d_after, segments.firsts, reverse=True)
        found.append(_walk_back(scans, late, saved, before, d_out, d_after))
        if sent is not None and not waits:
            sent.wait()
        return *_joined(found), None, None, None


class _Turn(NamedTuple):
    """Documents of a shard that are scanned in one call: their tokens, numbers and segments."""

    tokens: slice
    documents: slice
    segments: Segments

    def of(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the part for these documents of the tensors that `Scans.prepare` returns."""
        return tuple(x[:, self.tokens] for x in tensors)


def _turns(packed: PackedSequence, segments: Segments, waiting: int | None) -> list[_Turn]:
    """Return the documents grouped into calls. The last call has the document, number 0 or -1, that
    waits for its state from another rank; None: no document waits.

    On a GPU there is always one call: a GPU scans documents in parallel, so that two calls would
    take up to twice as long as one, and joining their results longer than the exchange.
    """
    count = packed.num_segments
    if waiting is None or count == 1 or packed.seq_idx.is_cuda or segments.are_cut(packed):
        return [_Turn(slice(None), slice(None), segments)]
    bounds = [(1, count), (0, 1)] if waiting == 0 else [(0, count - 1), (count - 1, count)]
    return [packed.cached(_turn, first, end) for first, end in bounds]


def _turn(packed: PackedSequence, first: int, end: int) -> _Turn:
    tokens = slice(*packed.cu_seqlens_cpu[[first, end]].tolist())
    return _Turn(
        tokens,
        slice(first, end),
        Segments.of(packed, [[length] for length in packed.lengths[first:end]]),
    )


def _walk_back(
    scans: Scans,
    turn: _Turn,
    saved: Sequence[Tensor],
    before: Tensor,
    d_out: Tensor,
    d_after: Tensor,
) -> tuple[Tensor, ...]:
    """Return the gradients of the inputs at the tokens of one call."""
    before, d_after = before[turn.documents], d_after[turn.documents]
    return scans.walk_back(turn.of(saved), before, d_out[:, turn.tokens], d_after, turn.segments)[
        :-1
    ]


def _joined(turns: Iterable[Sequence[Tensor]]) -> list[Tensor]:
    """Return the results of several calls, concatenated along the tokens."""
    return [
        parts[0] if len(parts) == 1 else torch.cat(parts, 1) for parts in zip(*turns, strict=True)
    ]


def _states(state: Tensor, packed: PackedSequence, document: int) -> Tensor:
    """Return states [N, HV, K, V]: `state` for one document, zero for all others."""
    states = state.new_zeros(packed.num_segments, *state.shape)
    states[document] = state
    return states


def _through(
    transition: Tensor | None, addend: Tensor, packed: PackedSequence, *, reverse: bool = False
) -> Tensor:
    """Return the final state [HV, K, V] of one document's segments from an initial state of zero;
    in reverse, the gradient of the initial state from a gradient of zero of the final state.
    """
    if transition is None or len(addend) == 1:
        return addend[0]
    # the state at the start of one more segment is the final state of these
    more = (0, 0) * 3 + ((1, 0) if reverse else (0, 1))
    transition, addend = F.pad(transition, more), F.pad(addend, more)
    found = fold(
        transition, addend, None, packed.cached(_one_document, len(addend)), reverse=reverse
    )
    return found[0 if reverse else -1]


def _product(transition: Tensor, packed: PackedSequence) -> Tensor:
    """Return the transition [HV, K, K] of all segments of one document: the first segment's
    transition, passed through the other segments like a state.
    """
    addend = torch.zeros_like(transition)
    addend[0] = transition[0]
    return _through(transition, addend, packed)


def _send(transition: Tensor, addend: Tensor, packed: PackedSequence) -> Pending:
    """Start to send all ranks the affine map of a shard, for states or for their gradients."""
    return start_gather(torch.cat([transition, addend], -1), shard_of(packed).group)


def _along(sent: Pending, ranks: slice, packed: PackedSequence, *, reverse: bool = False) -> Tensor:
    """Wait for the affine maps of all ranks, and return the states at the start of the shards of
    `ranks`; in reverse, the gradients of the states at their ends.
    """
    everyones = sent.wait()[ranks]
    size = everyones.shape[2]
    transitions, addends = everyones.split([size, everyones.shape[3] - size], -1)
    return fold(
        transitions, addends, None, packed.cached(_one_document, len(everyones)), reverse=reverse
    )


def _one_document(packed: PackedSequence, segments: int) -> Tensor:
    return torch.tensor([0, segments], dtype=torch.int32).to(
        packed.cu_seqlens.device, non_blocking=True
    )
