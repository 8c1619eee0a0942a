"""Attention over a sharded row: ranks exchange heads, or gather keys and values.

Shapes: T tokens of the whole row, W ranks, t = T / W, H query heads, HK key heads, D head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hf_packfree.packing import PackedSequence, shard_of, uncompiled
from hf_packfree.parallel.collectives import heads_to_tokens, send_heads, send_left_context
from hf_packfree.parallel.costs import keys_cost_less


@uncompiled
def attend_by_heads(
    backend: Any, q: Tensor, k: Tensor, v: Tensor, packed: PackedSequence, **options: Any
) -> Tensor:
    """Attend with H / W query heads on each rank, over all tokens (Jacobs et al.,
    DeepSpeed-Ulysses, arXiv:2309.14509).

    If W does not divide HK, key heads are repeated so that each rank has the key heads that its
    query heads read.

    Args:
        backend: an `AttentionBackend`.
        q: [1, t, H, D], with the rotary embedding of positions in the document; W divides H.
        k, v: [1, t, HK, D].
        packed: the record of the shard.
        options: keywords of `Backend.run`.

    Returns:
        [1, t, H, D].
    """
    shard = shard_of(packed)
    copies = math.lcm(k.shape[2], shard.world) // k.shape[2]
    if copies > 1:
        k, v = (x.repeat_interleave(copies, 2) for x in (k, v))
    heads = [x.shape[2] // shard.world for x in (q, k, v)]
    mine = send_heads([x[0] for x in (q, k, v)], shard.group).receive().flatten(0, 1)
    q, k, v = (x[None] for x in mine.split(heads, 1))
    attended = backend.running(shard.row)(q, k, v, shard.row, **options)
    return heads_to_tokens(attended[0], shard.group)[None]


@uncompiled
def attend_by_keys(
    backend: Any, q: Tensor, k: Tensor, v: Tensor, packed: PackedSequence, **options: Any
) -> Tensor:
    """Attend with this rank's queries to its own keys, and to earlier keys of its first document,
    which are gathered; for any number of heads.

    Each rank sends only the end of its shard that other ranks may need. The more tokens of a
    document are on earlier ranks, the longer this rank takes.

    Args and returns: see `attend_by_heads`.
    """
    shard, heads = shard_of(packed), k.shape[2]
    if not shard.sent:
        return backend.with_history(q, k, v, packed, **options)  # type: ignore[no-any-return]
    # only the tokens that other ranks may need
    ends = torch.cat([x[0, x.shape[1] - shard.sent :] for x in (k, v)], 1)
    left = send_left_context(ends, shard)()[None]
    k, v = torch.cat([left[:, :, :heads], k], 1), torch.cat([left[:, :, heads:], v], 1)
    return backend.with_history(q, k, v, packed, **options)  # type: ignore[no-any-return]


@uncompiled
def attend_by_row(
    backend: Any, q: Tensor, k: Tensor, v: Tensor, packed: PackedSequence, **options: Any
) -> Tensor:
    """Run `attend_by_keys` or `attend_by_heads`, whichever takes less time in this row; all ranks
    choose alike. With short documents there are few keys to gather, but all heads to exchange.

    Args and returns: see `attend_by_heads`.
    """
    sizes = q.shape[2], k.shape[2], q.shape[3]
    cheaper = packed.cached(_keys_cost_less, *sizes)
    return (attend_by_keys if cheaper else attend_by_heads)(backend, q, k, v, packed, **options)


def _keys_cost_less(packed: PackedSequence, heads: int, key_heads: int, size: int) -> bool:
    return keys_cost_less(shard_of(packed), heads, key_heads, size)
