"""What ranks pay for each way to share Gated DeltaNet, by which "auto" chooses: a layer's forward
and backward pass in bf16, beyond what one GPU's work divided by the ranks would take.

Shapes: t tokens a rank, W ranks, H key heads, HV value heads, K and V their sizes.
"""

from __future__ import annotations

from collections.abc import Mapping

from hf_packfree.parallel.measured import (
    BYTES_PER_S,
    COPY_S_PER_BYTE,
    EXCHANGE_S,
    RULE_S_PER_TOKEN_AND_HEAD,
)

TOKENS = 8192
"""t for which ways are compared: states gain on heads with more, and rows of fewer are no reason
for context parallelism.
"""


def bytes_by_heads(sizes: Mapping[str, int], world: int, tokens: int) -> float:
    """Return what a rank receives: q, k, v, both gates and the output, and their gradients.

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
    """Return what a rank receives: fp32 [HV, K, K + V] of every other rank, each way."""
    state = 4 * sizes["value_heads"] * sizes["key_size"] * (sizes["key_size"] + sizes["value_size"])
    return 2.0 * state * (world - 1)


def seconds_by_heads(sizes: Mapping[str, int], world: int, tokens: int = TOKENS) -> float:
    """Return the seconds of three exchanges each way, and of putting heads in order for them."""
    received = bytes_by_heads(sizes, world, tokens)
    return 6 * EXCHANGE_S + received * (1 / BYTES_PER_S + COPY_S_PER_BYTE)


def seconds_by_states(sizes: Mapping[str, int], world: int, tokens: int = TOKENS) -> float:
    """Return the seconds of two exchanges each way, and of the transition of a shard inside one
    document: for documents that cost most, one on all ranks.
    """
    # the first and the last rank have none
    inside = RULE_S_PER_TOKEN_AND_HEAD * tokens * sizes["value_heads"] if world > 2 else 0.0
    return 4 * EXCHANGE_S + bytes_by_states(sizes, world) / BYTES_PER_S + inside


def cheaper_for_gdn(sizes: Mapping[str, int], world: int) -> tuple[str, str]:
    """Return "state" or "heads", and why in a sentence."""
    costs = {"state": seconds_by_states(sizes, world), "heads": seconds_by_heads(sizes, world)}
    way, other = sorted(costs, key=costs.__getitem__)
    return way, (
        f"{way} is modelled at {costs[way] * 1e3:.2f} ms a layer, {other} at "
        f"{costs[other] * 1e3:.2f}, for {world} ranks with {TOKENS:,} tokens each of one document, "
        "at rates of two H200s"
    )
