"""The cost of each way to share a layer among ranks, by which "auto" chooses: the time of forward
and backward pass in bf16, beyond one GPU's time divided by the number of ranks.

Shapes: t tokens on each rank, W ranks. For Gated DeltaNet: H key heads, HV value heads, K and V
their sizes; for attention: H query heads, HK key heads, D their size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from hf_packfree.packing import RowShard
from hf_packfree.parallel.measured import (
    ATTENTION_S_PER_PAIR_AND_CHANNEL,
    BYTES_PER_S,
    COPY_S_PER_BYTE,
    EXCHANGE_S,
    RULE_S_PER_TOKEN_AND_HEAD,
)

TOKENS = 8192
"""The t for which ways are compared. Larger t favours "state" over "heads", and rows with smaller t
need no context parallelism.
"""


def bytes_by_heads(sizes: Mapping[str, int], world: int, tokens: int) -> float:
    """Return how many bytes a rank receives by exchange of heads: q, k, v, both gates and the
    output, and their gradients.

    Args:
        sizes: H, HV, K and V, as `op_sizes` names them.
        world, tokens: W and t.
    """
    keys, values = sizes["key_heads"], sizes["value_heads"]
    per_token = (
        2 * (2 * keys * sizes["key_size"] + values * sizes["value_size"])
        + 2 * 4 * values
        + 2 * values * sizes["value_size"]
    )
    return 2 * per_token * tokens * (world - 1) / world


def bytes_by_states(sizes: Mapping[str, int], world: int) -> float:
    """Return how many bytes a rank receives by exchange of states: fp32 [HV, K, K + V] from every
    other rank, in forward and in backward.

    Args:
        sizes: HV, K and V, as `op_sizes` names them.
        world: W.
    """
    state = 4 * sizes["value_heads"] * sizes["key_size"] * (sizes["key_size"] + sizes["value_size"])
    return 2.0 * state * (world - 1)


def seconds_by_heads(sizes: Mapping[str, int], world: int, tokens: int = TOKENS) -> float:
    """Return the seconds of exchange by heads: three exchanges in forward and three in backward,
    and the copies that reorder heads.
    """
    received = bytes_by_heads(sizes, world, tokens)
    return 6 * EXCHANGE_S + received * (1 / BYTES_PER_S + COPY_S_PER_BYTE)


def seconds_by_states(sizes: Mapping[str, int], world: int, tokens: int = TOKENS) -> float:
    """Return the seconds of exchange by states: two exchanges in forward and two in backward, and
    the transition of a shard inside one document. This is for the most expensive row, one document
    on all ranks.
    """
    # the shards of the first and the last rank are not inside the document
    inside = RULE_S_PER_TOKEN_AND_HEAD * tokens * sizes["value_heads"] if world > 2 else 0.0
    return 4 * EXCHANGE_S + bytes_by_states(sizes, world) / BYTES_PER_S + inside


def cheaper_for_gdn(sizes: Mapping[str, int], world: int) -> tuple[str, str]:
    """Return the way that takes less time, "state" or "heads", and why, as a sentence."""
    costs = {"state": seconds_by_states(sizes, world), "heads": seconds_by_heads(sizes, world)}
    way, other = sorted(costs, key=costs.__getitem__)
    return way, (
        f"{way} is modelled at {costs[way] * 1e3:.2f} ms a layer, {other} at "
        f"{costs[other] * 1e3:.2f}, for {world} ranks with {TOKENS:,} tokens each of one document, "
        "at rates of two H200s"
    )


def attention_bytes_by_heads(shard: RowShard, heads: int, key_heads: int, size: int) -> float:
    """Return how many bytes a rank receives by exchange of heads: q, k, v and the output, and their
    gradients.
    """
    copied = math.lcm(key_heads, shard.world)
    return 2 * 2 * (2 * heads + 2 * copied) * size * shard.tokens * (1 - 1 / shard.world)


def attention_bytes_by_keys(shard: RowShard, key_heads: int, size: int) -> float:
    """Return how many bytes a rank receives by gathering keys: the ends of other ranks' k and v,
    and their gradients.
    """
    return 2 * 2 * 2 * key_heads * size * shard.sent * (shard.world - 1.0)


def pairs(shard: RowShard) -> list[int]:
    """Return for every rank how many pairs of query and key it computes if keys are gathered.

    The history of a rank's first document counts as queries, too, because kernels without histories
    need equal numbers of queries and keys.
    """
    offsets, found = shard.row.cu_seqlens_cpu.tolist(), []
    for rank in range(shard.world):
        start = rank * shard.tokens
        end = start + shard.tokens
        lengths = [
            min(last, end) - first
            for first, last in zip(offsets, offsets[1:], strict=False)
            if first < end and last > start
        ]
        found.append(sum(length * (length + 1) // 2 for length in lengths))
    return found


def keys_cost_less(shard: RowShard, heads: int, key_heads: int, size: int) -> bool:
    """Whether attention takes less time in this row by gathering keys than by exchange of heads."""
    by_heads = attention_bytes_by_heads(shard, heads, key_heads, size)
    by_keys = attention_bytes_by_keys(shard, key_heads, size)
    whole = sum(length * (length + 1) // 2 for length in shard.row.lengths)
    more = max(pairs(shard)) - whole / shard.world
    # q, k, v and the output's gradient are copied once, to join them with the history: a sixth of
    # the copies of the exchange of heads
    joined = 2 * (2 * heads + 2 * key_heads) * size * shard.tokens * shard.is_cut
    return (
        2 * EXCHANGE_S * shard.is_cut
        + by_keys / BYTES_PER_S
        + joined * COPY_S_PER_BYTE / 6
        + more * heads * size * ATTENTION_S_PER_PAIR_AND_CHANNEL
    ) < 4 * EXCHANGE_S + by_heads * (1 / BYTES_PER_S + COPY_S_PER_BYTE)
