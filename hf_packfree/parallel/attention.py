"""Attention over a sharded row: every rank attends with its share of the heads, over all tokens.

Jacobs et al., DeepSpeed-Ulysses, arXiv:2309.14509.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hf_packfree.packing import PackedSequence, RowShard
from hf_packfree.parallel.collectives import heads_to_tokens, tokens_to_heads

Attend = Callable[[Tensor, Tensor, Tensor, PackedSequence], Tensor]


def attend_by_heads(q: Tensor, k: Tensor, v: Tensor, shard: RowShard, attend: Attend) -> Tensor:
    """Attend with H / W query heads a rank.

    Key heads that W does not divide are repeated until each rank has the one that its query heads read.

    Args:
        q: [1, t, H, D], rotated by positions in the document; W divides H.
        k, v: [1, t, HK, D].
        shard: of the record of the row.
        attend: (q, k, v, record) -> [1, T, heads, D] for a whole row.

    Returns:
        [1, t, H, D].
    """
    copies = math.lcm(k.shape[2], shard.world) // k.shape[2]
    if copies > 1:
        k, v = (x.repeat_interleave(copies, 2) for x in (k, v))
    by_rank = [x[0].unflatten(1, (shard.world, -1)) for x in (q, k, v)]
    heads = [x.shape[2] for x in by_rank]
    mine = tokens_to_heads(torch.cat(by_rank, 2).flatten(1, 2), shard.group)
    q, k, v = (x[None] for x in mine.split(heads, 1))
    out = attend(q, k, v, shard.row)
    return heads_to_tokens(out[0], shard.group)[None]
