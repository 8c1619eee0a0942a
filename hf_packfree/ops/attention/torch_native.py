"""Attention within documents in PyTorch eager, causal or not, without a T x T mask.

Shapes: T tokens of the row, N documents, H query heads, HK key/value heads, D head size, L padded
length of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_packfree.packing import PackedSequence, uncompiled, with_history

_STEP = {"cpu": 32}
"""The largest step in tokens from one padded length to the next, by device. A GPU has none: smaller
steps save padding, but the calls that they add cost more.
"""


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """n documents of similar length, as a padded batch; on the host.

    Attributes:
        gather: int64 [n, L], the row's token for every position; padding repeats its document's
            last token.
        real: int64 [t], the flat positions [n*L] of real tokens, in row order.
    """

    gather: Tensor
    real: Tensor


@dataclass(frozen=True, eq=False)
class Batches:
    """The row's documents sorted into padded batches, P positions in all.

    Attributes:
        shapes: documents and padded length of each batch.
        gather: int64 [P], the row's token for every position.
        places: int64 [T], the position of every token of the row.
    """

    shapes: tuple[tuple[int, int], ...]
    gather: Tensor
    places: Tensor


def plan_buckets(packed: PackedSequence, most: int | None = None) -> tuple[PaddedBatch, ...]:
    """Sort documents by length as `round_up` rounds it.

    The padded length depends on the document alone, so its values do not depend on what else is in
    the row; and any row has a few dozen buckets at most, unless `most` makes more of long ones.
    """
    starts, lengths = packed.cu_seqlens_cpu[:-1].long(), packed.cu_seqlens_cpu.diff().long()
    padded = torch.tensor([round_up(length, most) for length in lengths.tolist()], device="cpu")
    buckets = []
    for size in padded.unique().tolist():
        member = padded == size
        position = torch.arange(size, device="cpu")
        gather = starts[member, None] + torch.minimum(position[None], lengths[member, None] - 1)
        is_real = position[None] < lengths[member, None]
        buckets.append(PaddedBatch(gather, is_real.reshape(-1).nonzero()[:, 0]))
    return tuple(buckets)


def plan_batches(packed: PackedSequence) -> Batches:
    """Join the plans of all buckets into one gather."""
    device = packed.cu_seqlens.device
    buckets = plan_buckets(packed, _STEP.get(device.type))
    gather = torch.cat([bucket.gather.reshape(-1) for bucket in buckets])
    begins = accumulate((bucket.gather.numel() for bucket in buckets), initial=0)
    real = torch.cat([begin + bucket.real for begin, bucket in zip(begins, buckets)])
    places = torch.empty_like(real)
    places[gather[real]] = real
    shapes = tuple((len(bucket.gather), bucket.gather.shape[1]) for bucket in buckets)
    return Batches(
        shapes, gather.to(device, non_blocking=True), places.to(device, non_blocking=True)
    )


@uncompiled
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedSequence,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    causal: bool = True,
) -> Tensor:
    """See `hf_packfree.ops.attention.attention`."""
    if causal:
        return _attend_batches(q, k, v, packed.cached(plan_batches), scale, dropout)
    return _attend_runs(q, k, v, packed.cached(plan_runs), scale, dropout)


def attend_with_history(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedSequence,
    *,
    run: Callable[..., Tensor] = attend,
    **options: Any,
) -> Tensor:
    """See `AttentionBackend.with_history`; the history gets queries of zero,
    whose output is dropped.

    Args:
        run: the function that attends without a history; it is called with `options`.
    """
    history = k.shape[1] - q.shape[1]
    if not history:
        return run(q, k, v, packed, **options)
    longer = packed.cached(with_history, history)
    return run(F.pad(q, (0, 0, 0, 0, history, 0)), k, v, longer, **options)[:, history:]


def plan_runs(packed: PackedSequence) -> tuple[tuple[int, int], ...]:
    """Return (number of documents, their length) for every run of neighbouring documents of one
    length.
    """
    return tuple((len(list(run)), length) for length, run in groupby(packed.lengths))


def _attend_runs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    runs: tuple[tuple[int, int], ...],
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Attend in both directions, one call per run of documents of one length: batches of other
    lengths would need padding, and padding a mask.
    """
    sizes = [count * length for count, length in runs]
    outputs = []
    for run, *parts in zip(runs, *(x.squeeze(0).split(sizes) for x in (q, k, v)), strict=True):
        qs, ks, vs = (part.unflatten(0, run) for part in parts)
        outputs.append(_sdpa(qs, ks, vs, scale, dropout, causal=False).flatten(0, 1))
    return torch.cat(outputs)[None]


def _attend_batches(
    q: Tensor, k: Tensor, v: Tensor, plan: Batches, scale: float | None, dropout: float
) -> Tensor:
    """Attend causally: padding comes after every real query of its document, so the causal mask
    hides it.
    """
    sizes = [count * length for count, length in plan.shapes]
    parts = (x.squeeze(0).index_select(0, plan.gather).split(sizes) for x in (q, k, v))
    outputs = []
    for shape, *batch in zip(plan.shapes, *parts, strict=True):
        qs, ks, vs = (part.unflatten(0, shape) for part in batch)
        outputs.append(_sdpa(qs, ks, vs, scale, dropout, causal=True).flatten(0, 1))
    return torch.cat(outputs).index_select(0, plan.places)[None]


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float, causal: bool
) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, is_causal=causal, scale=scale
    ).transpose(1, 2)


def of_one_size(*inputs: Tensor) -> list[Tensor]:
    """Return q, k and v padded with channels of zero to the widest of them, which changes no
    score.
    """
    width = max(x.shape[3] for x in inputs)
    return [x if x.shape[3] == width else F.pad(x, (0, width - x.shape[3])) for x in inputs]


def round_up(length: int, most: int | None = None) -> int:
    """The smallest of 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, ... that holds
    `length`, four sizes per power of two; with `most`, at most that many tokens apart.
    """
    step = max(8, (1 << (length - 1).bit_length()) // 8) if length > 1 else 8
    step = step if most is None else min(step, most)
    return -(-length // step) * step
