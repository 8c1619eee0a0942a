"""Attention in a tree of shared prefixes in PyTorch eager: the queries of a shared prefix are in
the row once. Only its keys and values are repeated, in front of each segment that reads them.

Shapes: T tokens of the row, H query heads, HK key/value heads, D head size; of a batch n segments,
L queries and M keys each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_packfree.ops.attention.torch_native import round_up
from hf_packfree.ops.tree_paths import gather
from hf_packfree.packing import PackedSequence, uncompiled


@dataclass(frozen=True, eq=False)
class Branches:
    """Segments of similar length, after paths of similar length, as a padded batch.

    Attributes:
        queries: int64 [n, L], the row's token for every position; padding repeats the last one.
        keys: int64 [n, M], the row's tokens on the path in front of each segment, then `queries`.
        real: int64 [t], the flat positions [n*L] of real queries.
        seen: bool [L, M], True where a query sees a key; no real query sees padding. None for
            roots, whose attention is plainly causal.
    """

    queries: Tensor
    keys: Tensor
    real: Tensor
    seen: Tensor | None


@dataclass(frozen=True, eq=False)
class BranchPlan:
    """The row's segments sorted into batches; `order` int64 [T] undoes the sorting."""

    batches: tuple[Branches, ...]
    order: Tensor


def plan_branches(packed: PackedSequence) -> BranchPlan:
    """Sort segments into batches by the number of tokens in front of them, and by length as
    `plan_buckets` does.
    """
    tree: Any = packed.tree
    spans = list(map(torch.from_numpy, tree.spans()))
    sizes = list(zip(tree.before, map(round_up, tree.lengths), strict=True))
    there = partial(Tensor.to, device=packed.cu_seqlens.device, non_blocking=True)
    batches, tokens = list[Branches](), list[Tensor]()
    for before, size in sorted(set(sizes)):
        members = [segment for segment, found in enumerate(sizes) if found == (before, size)]
        place = torch.arange(size, device="cpu")
        queries = torch.stack([spans[one][place.clamp(max=len(spans[one]) - 1)] for one in members])
        paths = [torch.cat([spans[part] for part in tree.path(one)])[:before] for one in members]
        real = torch.cat([place < len(spans[one]) for one in members]).nonzero()[:, 0]
        tokens.append(queries.flatten()[real])
        seen = torch.ones(size, before + size, dtype=torch.bool, device="cpu").tril(before)
        keys = torch.cat([torch.stack(paths), queries], 1)
        batches.append(
            Branches(there(queries), there(keys), there(real), there(seen) if before else None)
        )
    return BranchPlan(tuple(batches), there(torch.cat(tokens).argsort()))


@uncompiled
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedSequence,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """See `hf_packfree.ops.attention.attention`, for a row of shared prefixes; the gradients of a
    key that several segments read are added in fp32 (fp64 if the input is).
    """
    plan, groups, outputs = packed.cached(plan_branches), q.shape[2] // k.shape[2], []
    for batch in plan.batches:
        qs = q[0].index_select(0, batch.queries.flatten()).unflatten(0, batch.queries.shape)
        ks, vs = (
            gather(x, batch.keys.flatten())[0]
            .unflatten(0, batch.keys.shape)
            .repeat_interleave(groups, 2)
            for x in (k, v)
        )
        qs, ks, vs = (x.transpose(1, 2) for x in (qs, ks, vs))
        out = F.scaled_dot_product_attention(
            qs, ks, vs, batch.seen, dropout, is_causal=batch.seen is None, scale=scale
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, batch.real))
    return torch.cat(outputs).index_select(0, plan.order)[None]
