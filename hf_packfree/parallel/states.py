"""The gated delta rule over a sharded row by exchange of states.

A shard maps the state of its document before it to the one behind it affinely, S' = M S + B, and the state's gradient too,
dS = M^T dS' + C.  So do the segments in which long documents are walked within a shard, see
`hf_packfree.ops.delta_rule.segments`.  Each rank sends [M, B] of its last document once forward, and [M, C] of its first once
backward, whatever their lengths; nothing where no document is on several ranks.  M matters only where a shard is inside one
document, and is zero elsewhere.

Shapes: T tokens of the whole row, W ranks, t = T / W, N segments of the shard, H key heads, HV value heads, K and V their
sizes, C = 2 H K + HV V.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_packfree.errors import BackendUnavailable
from hf_packfree.ops.conv import QK_L2NORM, qkv_conv
from hf_packfree.ops.delta_rule import cuts_on
from hf_packfree.ops.delta_rule.fla_segments import FLAScans
from hf_packfree.ops.delta_rule.flash_qla_segments import FlashQLAScans, lanes
from hf_packfree.ops.delta_rule.reference import rounded_l2norm
from hf_packfree.ops.delta_rule.segments import Scans, Segments, fold, plan_segments
from hf_packfree.ops.delta_rule.torch_chunked import TorchScans
from hf_packfree.ops.operation import Operation, once_differentiable
from hf_packfree.packing import PackedSequence, with_history
from hf_packfree.parallel.collectives import gathered, left_context

SCANS: dict[str, Scans] = {"flash_qla": FlashQLAScans(), "fla": FLAScans(), "torch": TorchScans()}
"""By backend of the delta rule."""


def conv_delta_rule_by_states(
    x: Tensor,
    weight: Tensor,
    g: Tensor,
    beta: Tensor,
    packed: PackedSequence,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    *,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    conv: str = "torch",
    delta_rule: str = "torch",
) -> Tensor:
    """Do what `conv_delta_rule` does, for any number of ranks.

    Args:
        x: [1, t, C]; weight: [C, taps]; g, beta: [1, t, HV]; bias: [C] or None.
        packed: the record of the shard.
        heads, sizes: (H, HV) and (K, V).
        activation, conv, delta_rule: of `conv_delta_rule`; `delta_rule` is a name in `SCANS`.

    Returns:
        [1, t, HV, V].

    Raises:
        BackendUnavailable: that backend of the delta rule gives no states.
    """
    if delta_rule not in SCANS:
        raise BackendUnavailable(
            f"found the delta rule on {delta_rule!r} under context parallelism that exchanges states; wanted it on "
            f"{' or '.join(SCANS)}; name one as backend, or exchange heads: ContextParallel(group, gdn='heads')"
        )
    left = left_context(x[0], packed.shard, weight.shape[1] - 1)
    longer = packed.cached(with_history, len(left))
    in_conv = conv in QK_L2NORM
    q, k, v = (part[:, len(left):] for part in qkv_conv(
        torch.cat([left, x[0]])[None], weight, longer, heads, sizes, bias=bias, activation=activation, qk_l2norm=in_conv,
        backend=conv,
    ))
    if not in_conv:
        q, k = map(rounded_l2norm, (q, k))
    segments = packed.cached(_segments, _lanes(v, delta_rule))
    return _Rule.apply(q, k, v, g, beta, packed, segments, SCANS[delta_rule])  # type: ignore[no-any-return]


def _lanes(v: Tensor, backend: str) -> int:
    """Return how many segments the device walks side by side; 0: documents are walked whole."""
    return lanes(v, v.shape[2]) if cuts_on(v.device, backend) else 0


def _segments(packed: PackedSequence, lanes: int) -> Segments:
    """Return a shard's documents in segments: long ones cut, as on one device, or each in one."""
    shard = packed.shard
    found = plan_segments(packed, lanes) if lanes else None
    found = found or Segments.of(packed, [[length] for length in packed.lengths])
    return found.continued(bool(shard.history(shard.rank)), shard.goes_on(shard.rank))


class _Rule(Operation):
    """Two exchanges, one each way, in which every rank takes part."""

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
        shard, saved = packed.shard, scans.prepare(q, k, v, g, beta, segments)
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        state = q.new_zeros(v.shape[2], q.shape[3], v.shape[3], dtype=dtype)
        inside = state.new_zeros(v.shape[2], q.shape[3], q.shape[3])
        transition, addend = scans.summarize(saved, segments) if segments.chunks_cpu[0].any() else (inside[None], state[None])
        if shard.is_cut:
            left, last = state, segments.of_last()
            if shard.goes_on(shard.rank):
                left = _through(transition[last], addend[last], packed)
                if shard.history(shard.rank) and packed.num_segments == 1:
                    inside = _product(transition[last], packed)
            state = _along(inside, left, slice(shard.before().start, shard.rank + 1), packed)[-1]
        before = _states(state, packed, 0)
        if segments.are_cut(packed):
            before = fold(transition, addend, before, segments.firsts)
        out, _ = scans.walk(saved, before, segments)
        ctx.save_for_backward(*saved, inside, *(transition, before) if segments.are_cut(packed) else (None, state))
        ctx.plan = packed, segments, scans
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        *saved, inside, transition, before = ctx.saved_tensors
        packed, segments, scans = ctx.plan
        shard, d_out = packed.shard, d_out.contiguous()
        if not segments.are_cut(packed):
            before = _states(before, packed, 0)
        d_state, first = torch.zeros_like(before[0]), segments.of_first()
        addend = scans.summarize_gradient(saved, d_out, segments) if segments.chunks_cpu[1].any() else d_state[None]
        if shard.is_cut:
            left = d_state
            if shard.history(shard.rank):
                left = _through(None if transition is None else transition[first], addend[first], packed, reverse=True)
            d_state = _along(inside, left, slice(shard.rank, shard.behind().start + 1), packed, reverse=True)[0]
        d_after = _states(d_state, packed, -1)
        if segments.are_cut(packed):
            d_after = fold(transition, addend, d_after, segments.firsts, reverse=True)
        *gradients, _ = scans.walk_back(saved, before, d_out, d_after, segments)
        return *gradients, None, None, None


def _states(state: Tensor, packed: PackedSequence, document: int) -> Tensor:
    """Return [N, HV, K, V]: the state of one document, and zero of all others."""
    states = state.new_zeros(packed.num_segments, *state.shape)
    states[document] = state
    return states


def _through(transition: Tensor | None, addend: Tensor, packed: PackedSequence, *, reverse: bool = False) -> Tensor:
    """Return what the segments of one document leave of a state of zero, or in reverse of a gradient of zero, [HV, K, V]."""
    if transition is None or len(addend) == 1:
        return addend[0]
    more = (0, 0) * 3 + ((1, 0) if reverse else (0, 1))  # one more segment, which begins with what these leave
    transition, addend = F.pad(transition, more), F.pad(addend, more)
    found = fold(transition, addend, None, packed.cached(_one_document, len(addend)), reverse=reverse)
    return found[0 if reverse else -1]


def _product(transition: Tensor, packed: PackedSequence) -> Tensor:
    """Return the transition of all segments of one document, [HV, K, K]: the first one's is what the others begin with."""
    addend = torch.zeros_like(transition)
    addend[0] = transition[0]
    return _through(transition, addend, packed)


def _along(transition: Tensor, addend: Tensor, ranks: slice, packed: PackedSequence, *, reverse: bool = False) -> Tensor:
    """Return the states that the shards of these ranks begin with, or in reverse end with; every rank gives its own shard's."""
    size = transition.shape[-1]
    everyones = gathered(torch.cat([transition, addend], -1), packed.shard.group)[ranks]
    transitions, addends = everyones.split([size, addend.shape[-1]], -1)
    return fold(transitions, addends, None, packed.cached(_one_document, len(everyones)), reverse=reverse)


def _one_document(packed: PackedSequence, segments: int) -> Tensor:
    return torch.tensor([0, segments], dtype=torch.int32).to(packed.cu_seqlens.device, non_blocking=True)
