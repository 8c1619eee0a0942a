"""The convolution and the gated delta rule over a sharded row.

Shapes: T tokens of the whole row, W ranks, t = T / W, H key heads, HV value heads, K and V their sizes, C = 2 H K + HV V.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_packfree.ops.conv_delta_rule import conv_delta_rule
from hf_packfree.packing import PackedSequence, RowShard
from hf_packfree.parallel.collectives import heads_to_tokens, tokens_to_heads
from hf_packfree.parallel.states import conv_delta_rule_by_states


def conv_delta_rule_by_heads(
    x: Tensor,
    weight: Tensor,
    g: Tensor,
    beta: Tensor,
    packed: PackedSequence,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    *,
    bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Do what `conv_delta_rule` does, with H / W key heads a rank and the value heads that read them, over all tokens.

    Both mix tokens head by head, the convolution even channel by channel, so that each rank computes what one device would.

    Args:
        x: [1, t, C]; weight: [C, taps]; g, beta: [1, t, HV]; bias: [C] or None.
        packed: the record of the shard; W divides H.
        heads, sizes: (H, HV) and (K, V).
        options: of `conv_delta_rule`: activation and backends.

    Returns:
        [1, t, HV, V].
    """
    shard: RowShard = packed.shard
    (keys, values), (key_size, value_size) = heads, sizes
    widths = [keys * key_size, keys * key_size, values * value_size]

    def per_rank(channels: Tensor, dim: int) -> Tensor:
        """Cut q, k and v [.., C, ..] into each rank's heads: [.., W, C / W, ..]."""
        return torch.cat([part.unflatten(dim, (shard.world, -1)) for part in channels.split(widths, dim)], dim + 1)

    mixed = tokens_to_heads(per_rank(x[0], 1).flatten(1, 2), shard.group)
    gates = tokens_to_heads(torch.stack([g[0], beta[0].to(g.dtype)], 2), shard.group)
    out = conv_delta_rule(
        mixed[None], per_rank(weight, 0)[shard.rank], gates[None, ..., 0], gates[None, ..., 1].to(beta.dtype), shard.row,
        (keys // shard.world, values // shard.world), sizes,
        bias=None if bias is None else per_rank(bias, 0)[shard.rank], **options,
    )
    return heads_to_tokens(out[0], shard.group)[None]


SHARED = {"heads": conv_delta_rule_by_heads, "state": conv_delta_rule_by_states}
"""By the name of the way."""
