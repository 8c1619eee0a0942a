"""Attention within documents with a sliding window, capped scores or sinks, and with values of
another size than keys. In PyTorch eager, without a T x T mask.

The first `window` tokens of a document attend like a document of their own. The rest is cut into
blocks of `window` queries, each of which sees its own block and the one before, under one band.

Shapes: T tokens of the row, H query heads, HK key heads, D head size, DV size of a value; of a
piece n documents or blocks, L queries and M keys each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_packfree.ops.attention.torch_native import of_one_size, plan_buckets
from hf_packfree.ops.backend import Target
from hf_packfree.packing import PackedSequence, chunk_plan, uncompiled

WANTED = {
    "window": "a sliding window",
    "softcap": "capped scores",
    "sinks": "attention sinks",
    "other_value_size": "values of another size than keys",
}
"""{name in `Target.sizes`: the option in words}; the first three are keywords of `attention`,
too.
"""


def refused(target: Target, takes: frozenset[str]) -> str | None:
    """Return why kernels that support only the options `takes` cannot run the model's attention, or
    None.
    """
    lacking = (name for name in WANTED if name not in takes and target.sizes.get(name))
    found = [WANTED[name] for name in lacking]
    return f"its kernels lack {' and '.join(found)}" if found else None


@dataclass(frozen=True, eq=False)
class Piece:
    """Documents or blocks as a padded batch.

    Attributes:
        queries: int64 [n, L], the row's token for every position; padding repeats a real token.
        keys: int64 [n, M].
        real: int64 [t], the flat positions [n*L] of real queries.
        is_band: M is 2 L, and query i sees keys i + 1 to i + L; otherwise keys 0 to i.
    """

    queries: Tensor
    keys: Tensor
    real: Tensor
    is_band: bool


@dataclass(frozen=True, eq=False)
class Pieces:
    """The row's tokens sorted into pieces; `order` int64 [T] undoes the sorting."""

    pieces: tuple[Piece, ...]
    order: Tensor


def plan_pieces(packed: PackedSequence, window: int | None) -> Pieces:
    """Sort the row's tokens into the first `window` tokens of each document, batched by length, and
    the blocks of `window` queries after these.
    """
    device, starts = packed.cu_seqlens.device, packed.cu_seqlens_cpu[:-1].long()
    lengths = packed.cu_seqlens_cpu.diff().long()
    reach = min(window or packed.max_seqlen, packed.max_seqlen)
    fronts = PackedSequence.from_lengths(lengths.clamp(max=reach), device="cpu")
    # the place in the row of every token in `fronts`, the row of documents' first tokens
    places = torch.arange(fronts.num_tokens, device="cpu")
    places += (starts - fronts.cu_seqlens_cpu[:-1])[fronts.seq_idx[0].long()]
    found, tokens = [], []
    for bucket in plan_buckets(fronts):
        queries = places[bucket.gather]
        found.append((queries, queries, bucket.real, False))
        tokens.append(queries.flatten()[bucket.real])
    _, segment, number = (x.long() for x in chunk_plan(packed, reach))
    segment, number = segment[number > 0], number[number > 0]
    if segment.numel():
        begins, last = starts[segment] + number * reach, (starts + lengths - 1)[segment, None]
        queries = begins[:, None] + torch.arange(reach, device="cpu")
        keys = begins[:, None] + torch.arange(-reach, reach, device="cpu")
        real = (queries <= last).flatten().nonzero()[:, 0]
        queries, keys = torch.minimum(queries, last), torch.minimum(keys, last)
        found.append((queries, keys, real, True))
        tokens.append(queries.flatten()[real])
    there = partial(torch.Tensor.to, device=device, non_blocking=True)
    pieces = [Piece(there(q), there(k), there(real), band) for q, k, real, band in found]
    return Pieces(tuple(pieces), there(torch.cat(tokens).argsort()))


@uncompiled
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedSequence,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `hf_packfree.ops.attention.attention`."""
    plan, scale = packed.cached(plan_pieces, window), q.shape[3] ** -0.5 if scale is None else scale
    outputs = []
    for piece in plan.pieces:
        qs, ks, vs = (
            x[0].index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)
            for x, index in ((q, piece.queries), (k, piece.keys), (v, piece.keys))
        )
        out = _attend(qs, ks, vs, scale, dropout, piece.is_band, softcap, sinks)
        outputs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, piece.real))
    return torch.cat(outputs).index_select(0, plan.order)[None]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    dropout: float,
    is_band: bool,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return [n, H, L, DV] of q [n, H, L, D], k [n, HK, M, D] and v [n, HK, M, DV]."""
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    seen = _band(q) if is_band else None
    if softcap is not None:
        return _attend_by_scores(q, k, v, scale, dropout, seen, softcap, sinks)
    size = v.shape[3]
    if sinks is not None:
        q, k, v = _with_sinks(q, k, v, sinks, scale, whole=is_band)
        seen = None if seen is None else F.pad(seen, (1, 0), value=True)
    q, k, v = of_one_size(q, k, v)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, dropout_p=dropout, is_causal=seen is None, scale=scale
    )
    return out[:, :, 1 if sinks is not None and not is_band else 0 :, :size]


def _band(q: Tensor) -> Tensor:
    """Return bool [L, 2 L]: True where a query sees a key."""
    number = torch.arange(q.shape[2], device=q.device)[:, None]
    key = torch.arange(2 * q.shape[2], device=q.device)
    return (key > number) & (key <= number + q.shape[2])


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float, *, whole: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with one more key in front, whose score is `sinks` [H] for every query and
    whose value is zero: a kernel without sinks then computes the softmax with them.

    Two more channels carry the score: `sinks / scale`, and its rounding error.

    Args:
        whole: a mask lets each query see that key; otherwise one more query is put in front, so
            that the causal mask lets all others see it.
    """
    more = 8 - q.shape[3] % 8
    more += 8 if more < 2 else 0
    score = (sinks.to(torch.promote_types(sinks.dtype, torch.float32)) / scale)[None, :, None]
    high = score.to(q.dtype)
    carried = F.pad(torch.stack([high, (score - high).to(q.dtype)], -1), (0, more - 2))
    q = torch.cat([q, carried.expand(*q.shape[:3], more)], 3)
    k, v = F.pad(k, (0, more, 1, 0)), F.pad(v, (0, 0, 1, 0))
    ones = torch.zeros(k.shape[3], dtype=k.dtype, device=k.device)
    ones[q.shape[3] - more : q.shape[3] - more + 2] = 1
    k = torch.cat([ones.expand(*k.shape[:2], 1, -1), k[:, :, 1:]], 2)
    return q if whole else F.pad(q, (0, 0, 1, 0)), k, v


def _attend_by_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    dropout: float,
    seen: Tensor | None,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with the scores in memory, as softcap * tanh(score / softcap): torch's kernels have no
    cap. Shapes: see `_attend`.
    """
    if seen is None:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = softcap * torch.tanh(q @ k.transpose(2, 3) * (scale / softcap))
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sink_scores = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink_scores], 3)
    weights = scores.softmax(3, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    return F.dropout(weights, dropout)[..., : v.shape[2]] @ v
