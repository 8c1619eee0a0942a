"""What stands in for exchanges counts what they would send."""

from __future__ import annotations

import torch

from hf_packfree import PackedSequence
from hf_packfree.ops.attention import attention
from hf_packfree.packing import shard_row
from hf_packfree.parallel import ContextParallel, collectives
from tests.benchmarks.context_parallel_cases import cases
from tests.benchmarks.exchanges import Alone, exchanging


def test_bytes_of_attention_by_heads():
    """Of queries and output H heads of D channels, of keys and values as many as ranks if that
    is more than they have.
    """
    world, tokens, heads, keys, size = 4, 24, 8, 2, 16
    row, ways = PackedSequence.from_lengths([50, world * tokens - 50]), {"attention": "heads"}
    local = shard_row(row, 1, world, ways=ways)
    q, k, v = (torch.randn(1, tokens, count, size) for count in (heads, keys, keys))
    before = collectives.dist
    with exchanging(Alone(1, world)) as how:
        assert (ContextParallel(None).rank, ContextParallel(None).world) == (1, world)
        out = attention(q, k, v, local)
    assert collectives.dist is before and out.shape == q.shape
    assert (how.calls, how.received) == (
        2,
        4 * tokens * size * (2 * heads + 2 * world) * (world - 1) / world,
    )
    assert how.seconds(rate=how.received, latency=0.5) == 2.0


def test_rows_of_context_parallelism_have_names_of_their_own():
    names = [(case.name, case.documents) for case in cases(tiny=False)]
    assert len(set(names)) == len(names) == 16
    assert all(
        case.load.real_tokens == int(case.name.split("-")[1][:-1]) * 1024
        for case in cases(tiny=False)
        if case.kind != "images"
    )
