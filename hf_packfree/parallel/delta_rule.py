"""The convolution and the gated delta rule over a sharded row.

Shapes: T tokens of the whole row, W ranks, t = T / W, H key heads, HV value heads, K and V their
sizes, C = 2 H K + HV V.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_packfree.ops.conv_delta_rule import conv_delta_rule
from hf_packfree.packing import PackedSequence, shard_of
from hf_packfree.parallel.collectives import heads_to_tokens, send_heads
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
    """Do what `conv_delta_rule` does, with H / W key heads a rank and the value heads that read
    them, over all tokens.

    Both mix tokens head by head, the convolution even channel by channel, so that each rank
    computes what one device would.

    Args:
        x: [1, t, C]; weight: [C, taps] or [C, 1, taps]; g, beta: [1, t, HV]; bias: [C] or None.
        packed: the record of the shard; W divides H.
        heads, sizes: (H, HV) and (K, V).
        options: of `conv_delta_rule`: activation and backends.

    Returns:
        [1, t, HV, V].
    """
    shard = shard_of(packed)
    (keys, values), (key_size, value_size) = heads, sizes
    widths = [keys * key_size, keys * key_size, values * value_size]

    def mine(channels: Tensor) -> Tensor:
        """Return this rank's of q, k and v [C, ...]."""
        return torch.cat([part.chunk(shard.world)[shard.rank] for part in channels.split(widths)])

    # while what follows is put in order
    sent = send_heads([torch.stack([g[0], beta[0].to(g.dtype)], 2)], shard.group)
    mixed = send_heads(x[0].split(widths, 1), shard.group).receive().flatten(0, 1)
    gates = sent.receive().flatten(0, 1)
    out = conv_delta_rule(
        mixed[None],
        mine(weight),
        gates[None, ..., 0],
        gates[None, ..., 1].to(beta.dtype),
        shard.row,
        (keys // shard.world, values // shard.world),
        sizes,
        bias=None if bias is None else mine(bias),
        **options,
    )
    return heads_to_tokens(out[0], shard.group)[None]


SHARED = {"heads": conv_delta_rule_by_heads, "state": conv_delta_rule_by_states}
"""By the name of the way."""
