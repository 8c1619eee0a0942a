"""The gated delta rule over a sharded row, by exchange of heads or of states.

A shard maps the recurrent state before it to the one after it affinely, S' = M S + B, and the
state's gradient too, dS = M^T dS' + C. So do the segments in which long documents are walked within
a shard, see `hf_packfree.ops.delta_rule.segments`. Each rank sends [M, B] of its last document once
forward, and [M, C] of its first once backward, whatever their lengths; nothing where no document is
on several ranks. M matters only where a shard is inside one document, and is zero elsewhere.

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
    """Run the rule with H / W key heads a rank and the value heads that read them, over all
    tokens; W divides H. Args and returns as of `delta_rule_by_states`.
    """
    shard, sizes = shard_of(packed), (q.shape[3], k.shape[3], v.shape[3])
    parts = [x[0].flatten(1) for x in (q, k, v)]
    mixed, g, beta = exchange_heads(parts, g, beta, packed)
    shares = mixed.split([part.shape[1] // shard.world for part in parts], -1)
    heads = (x.unflatten(-1, (-1, size)) for x, size in zip(shares, sizes, strict=True))
    out = backend.running(shard.row)(*heads, g, beta, shard.row, qk_l2norm)
    return heads_to_tokens(out[0], shard.group)[None]


def exchange_heads(
    parts: Iterable[Tensor], g: Tensor, beta: Tensor, packed: PackedSequence
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all tokens of this rank's heads: what lies side by side [1, T, C / W], g and beta
    [1, T, HV / W].

    Args:
        parts: q, k and v [t, H K], [t, H K] and [t, HV V], convolved or not.
        g, beta: [1, t, HV].
        packed: the record of the shard.
    """
    group = shard_of(packed).group
    # while what follows is put in order
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
    """Run the rule on this rank's tokens, for any number of ranks.

    Args:
        backend: a `DeltaRuleBackend`; here with `scans`.
        q, k, v, g, beta, qk_l2norm: see `hf_packfree.ops.delta_rule.gated_delta_rule`, of t tokens.
        packed: the record of the shard.

    Returns:
        [1, t, HV, V].
    """
    if qk_l2norm:
        q, k = map(rounded_l2norm, (q, k))
    segments = packed.cached(_segments, _parallel_segments(v, backend))
    return _Rule.apply(q, k, v, g, beta, packed, segments, backend.scans)  # type: ignore[no-any-return]


def _parallel_segments(v: Tensor, backend: Any) -> int:
    """Return how many segments the device scans in parallel; 0: documents are scanned whole."""
    cuts = backend.long is not None and backend.long.takes(v.device, {})
    return parallel_segments(v, v.shape[2]) if cuts else 0


def _segments(packed: PackedSequence, parallel: int) -> Segments:
    """Return a shard's documents in segments: long ones cut, as on one device, or each in one."""
    shard = shard_of(packed)
    found = plan_segments(packed, parallel) if parallel else None
    found = found or Segments.of(packed, [[length] for length in packed.lengths])
    return found.continued(bool(shard.history(shard.rank)), shard.goes_on(shard.rank))


class _Rule(Function):
    """One exchange forward and one backward, in which every rank takes part; documents that need
    none are scanned meanwhile.
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
            scans.walk(turn.of(saved), before[turn.documents], turn.segments)[:1] for turn in early
        ]
        if waits:
            state = _along(sent, slice(shard.before().start, shard.rank + 1), packed)[-1]
            before[0] = state
        if segments.are_cut(packed):
            before = fold(transition, addend, before, segments.firsts)
        outs.append(scans.walk(late.of(saved), before[late.documents], late.segments)[:1])
        if sent is not None and not waits:
            # for the sake of its memory alone
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
        """Return their part of what `Scans.prepare` returns."""
        return tuple(x[:, self.tokens] for x in tensors)


def _turns(packed: PackedSequence, segments: Segments, waiting: int | None) -> list[_Turn]:
    """Return the documents grouped into calls; in the last one is the document, 0 or -1, that waits
    for its state from another rank.

    On a GPU there is one turn, whoever waits: documents are walked side by side there, so that two
    turns would take up to twice the time of one, and joining what they return more than the
    exchange.
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
    """Return the gradients of the inputs at a turn's tokens."""
    before, d_after = before[turn.documents], d_after[turn.documents]
    return scans.walk_back(turn.of(saved), before, d_out[:, turn.tokens], d_after, turn.segments)[
        :-1
    ]


def _joined(turns: Iterable[Sequence[Tensor]]) -> list[Tensor]:
    """Concatenate what turns found along the tokens."""
    return [
        parts[0] if len(parts) == 1 else torch.cat(parts, 1) for parts in zip(*turns, strict=True)
    ]


def _states(state: Tensor, packed: PackedSequence, document: int) -> Tensor:
    """Return [N, HV, K, V]: the state of one document, and zero of all others."""
    states = state.new_zeros(packed.num_segments, *state.shape)
    states[document] = state
    return states


def _through(
    transition: Tensor | None, addend: Tensor, packed: PackedSequence, *, reverse: bool = False
) -> Tensor:
    """Return the final state of one document's segments from an initial state of zero, or in
    reverse the initial state's gradient from a final one of zero, [HV, K, V].
    """
    if transition is None or len(addend) == 1:
        return addend[0]
    # one more segment, which begins with what these leave
    more = (0, 0) * 3 + ((1, 0) if reverse else (0, 1))
    transition, addend = F.pad(transition, more), F.pad(addend, more)
    found = fold(
        transition, addend, None, packed.cached(_one_document, len(addend)), reverse=reverse
    )
    return found[0 if reverse else -1]


def _product(transition: Tensor, packed: PackedSequence) -> Tensor:
    """Return the transition of all segments of one document, [HV, K, K]: the first one's is what
    the others begin with.
    """
    addend = torch.zeros_like(transition)
    addend[0] = transition[0]
    return _through(transition, addend, packed)


def _send(transition: Tensor, addend: Tensor, packed: PackedSequence) -> Pending:
    """Start to give all ranks what a shard does to a state, or to the gradient of one."""
    return start_gather(torch.cat([transition, addend], -1), shard_of(packed).group)


def _along(sent: Pending, ranks: slice, packed: PackedSequence, *, reverse: bool = False) -> Tensor:
    """Return the states that the shards of these ranks begin with, or in reverse end with, once
    all ranks have sent theirs.
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
