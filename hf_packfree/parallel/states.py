"""The gated delta rule over a sharded row by exchange of states.

A shard maps the state of its document before it to the one behind it affinely, S' = M S + B, and the state's gradient too,
dS = M^T dS' + C; `hf_packfree.ops.delta_rule.segments` walks parts of documents side by side on one device in the same way.
Each rank sends [M, B] of its last document once forward, and [M^T, C] of its first once backward, whatever their lengths;
nothing where no document is on several ranks.  M matters only where a shard lies inside one document, and is zero elsewhere.

Shapes: T tokens of the whole row, W ranks, t = T / W, N segments of the shard, H key heads, HV value heads, K and V their
sizes, C = 2 H K + HV V.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_packfree.errors import BackendUnavailable
from hf_packfree.ops.conv import QK_L2NORM, qkv_conv
from hf_packfree.ops.delta_rule.fla_segments import FLAScans
from hf_packfree.ops.delta_rule.flash_qla_segments import FlashQLAScans
from hf_packfree.ops.delta_rule.reference import rounded_l2norm
from hf_packfree.ops.delta_rule.segments import Scans, Segments
from hf_packfree.ops.delta_rule.torch_chunked import TorchScans
from hf_packfree.ops.fla import CHUNK
from hf_packfree.ops.operation import Operation
from hf_packfree.packing import PackedSequence, RowShard, with_history
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
    return _Rule.apply(q, k, v, g, beta, packed, SCANS[delta_rule])  # type: ignore[no-any-return]


def _segments(packed: PackedSequence) -> Segments:
    """Return a shard's documents as segments, of which the first and the last may be parts of longer ones."""
    return Segments(packed, *packed.cached(_tables))


def _tables(packed: PackedSequence) -> tuple[Tensor, ...]:
    """Return what `Segments` has beside the record, which may not hold itself: FSDP2 walks through a layer's arguments."""
    count, device, shard = packed.num_segments, packed.cu_seqlens.device, packed.shard
    sizes = -(-packed.cu_seqlens_cpu.diff() // CHUNK)
    chunks = torch.zeros(2, count, dtype=torch.int32)
    chunks[0, -1] = sizes[-1] * shard.goes_on(shard.rank)
    chunks[1, 0] = sizes[0] * bool(shard.history(shard.rank))
    numbers = torch.arange(count + 1, dtype=torch.int32)
    tables = numbers, numbers[:-1].long(), chunks
    return *(one.to(device, non_blocking=True) for one in tables), chunks


class _Rule(Operation):
    """Two exchanges, one each way, in which every rank takes part."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, packed: PackedSequence, scans: Scans
    ) -> Tensor:
        shard, segments = packed.shard, _segments(packed)
        saved = scans.prepare(q, k, v, g, beta, segments)
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        before = q.new_zeros(packed.num_segments, v.shape[2], q.shape[3], v.shape[3], dtype=dtype)
        transition = before.new_zeros(v.shape[2], q.shape[3], q.shape[3])
        if shard.is_cut:
            addend = torch.zeros_like(before[0])
            if shard.goes_on(shard.rank):
                transitions, addends = scans.summarize(saved, segments)
                addend = addends[-1]
                if shard.history(shard.rank) and packed.num_segments == 1:
                    transition = transitions[-1]
            before[0] = _folded(transition, addend, shard, shard.before())
        out, _ = scans.walk(saved, before, segments)
        ctx.save_for_backward(*saved, transition, before)
        ctx.plan = packed, segments, scans
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        *saved, transition, before = ctx.saved_tensors
        packed, segments, scans = ctx.plan
        shard, d_out, d_final = packed.shard, d_out.contiguous(), torch.zeros_like(before)
        if shard.is_cut:
            addend = torch.zeros_like(before[0])
            if shard.history(shard.rank):
                addend = scans.summarize_gradient(saved, d_out, segments)[0]
            d_final[-1] = _folded(transition.mT, addend, shard, shard.behind())
        *gradients, _ = scans.walk_back(saved, before, d_out, d_final, segments)
        return *gradients, None, None


def _folded(transition: Tensor, addend: Tensor, shard: RowShard, ranks: range) -> Tensor:
    """Return what the shards of these ranks, one after the other, make of a state of zero; every rank gives its own."""
    size = transition.shape[-1]
    everyones = gathered(torch.cat([transition, addend], -1), shard.group)
    parts = (everyones[rank].split([size, addend.shape[-1]], -1) for rank in ranks)
    return reduce(lambda state, part: part[0] @ state + part[1], parts, torch.zeros_like(addend))
