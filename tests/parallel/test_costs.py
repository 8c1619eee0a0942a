"""What "auto" takes, and that it counts the bytes that ranks exchange."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from hf_packfree import PackedSequence, apply_patches, patch_report
from hf_packfree.errors import BackendUnavailable
from hf_packfree.models.context_parallel import resolve_ways
from hf_packfree.ops import attention, delta_rule
from hf_packfree.ops.conv_delta_rule import conv_delta_rule
from hf_packfree.packing import shard_row
from hf_packfree.parallel import GDN, Attention, ContextParallel, costs
from tests.benchmarks.context_parallel_costs import gdn_sizes
from tests.benchmarks.exchanges import Alone, exchanging
from tests.parallel.ranks import in_way
from tests.support import by_family, tiny

SIZES = {"key_heads": 4, "value_heads": 8, "key_size": 16, "value_size": 16}


def received(way: str, world: int, tokens: int) -> float:
    """Return the bytes that a rank receives forward and backward, of one document in bf16."""
    torch.manual_seed(0)
    local = shard_row(PackedSequence.from_lengths([world * tokens]), 1, world)
    channels = 2 * 4 * 16 + 8 * 16
    x = torch.randn(1, tokens, channels, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(channels, 1, dtype=torch.bfloat16)
    g, beta = -torch.rand(1, tokens, 8), torch.rand(1, tokens, 8)
    with exchanging(Alone(1, world)) as how:
        given = g.requires_grad_(), beta.requires_grad_(), in_way(local, delta_rule=way)
        conv_delta_rule(x, weight, *given, (4, 8), (16, 16)).sum().backward()
    return how.received


def test_bytes_are_those_that_are_exchanged():
    assert received("heads", 4, 24) == costs.bytes_by_heads(SIZES, 4, 24)
    assert received("state", 4, 24) == costs.bytes_by_states(SIZES, 4)


EIGHT_K = [8000] * 8 + [1536]
"""65,536 tokens; on two ranks the fifth document is on both."""


@pytest.mark.parametrize(
    ("lengths", "world", "keys"),
    [
        (EIGHT_K, 2, True),
        (EIGHT_K * 2, 4, True),
        ([16384] * 4, 2, True),
        ([65536], 2, False),
        ([65536], 8, False),
        ([32000, 33536], 2, True),
        ([30000, 35536], 2, False),
        ([20000, 45536], 2, False),
    ],
)
def test_rows_of_short_documents_gather_keys_and_those_of_long_ones_exchange_heads(
    lengths, world, keys
):
    shard = shard_row(PackedSequence.from_lengths(lengths), 0, world).shard
    assert costs.keys_cost_less(shard, 8, 2, 256) is keys


def test_keys_of_one_part_of_a_document_are_all_that_is_exchanged_in_a_row_of_short_ones():
    """And the pairs of queries and keys are within 1% of half of all, as by heads."""
    shard = shard_row(PackedSequence.from_lengths(EIGHT_K), 0, 2).shard
    by_heads = costs.attention_bytes_by_heads(shard, 8, 2, 256)
    assert costs.attention_bytes_by_keys(shard, 2, 256) < by_heads / 100
    half = sum(n * (n + 1) // 2 for n in EIGHT_K) / 2
    assert max(costs.pairs(shard)) / half - 1 < 0.01


@pytest.mark.parametrize("way", attention.OP.across_ranks.ways)
@pytest.mark.parametrize("lengths", [[10, 5, 9], [24], [12, 12]])
def test_attentions_bytes_are_those_that_are_exchanged(way, lengths):
    torch.manual_seed(0)
    local = shard_row(PackedSequence.from_lengths(lengths), 1, 2)
    q, k, v = (
        torch.randn(1, 12, heads, 16, dtype=torch.bfloat16).requires_grad_() for heads in (4, 2, 2)
    )
    with exchanging(Alone(1, 2)) as how:
        out = attention.attention(q, k, v, in_way(local, attention=way))
        out.float().sum().backward()
    by_heads = costs.attention_bytes_by_heads(local.shard, 4, 2, 16)
    by_keys = costs.attention_bytes_by_keys(local.shard, 2, 16)
    keys = costs.keys_cost_less(local.shard, 4, 2, 16)
    wanted = {"heads": by_heads, "gather": by_keys, "auto": by_keys if keys else by_heads}
    assert how.received == wanted[way]


@pytest.mark.parametrize("world", [2, 4, 8])
def test_shards_that_are_worth_it_exchange_states_and_tiny_ones_heads(world):
    sizes = gdn_sizes()
    way, why = costs.cheaper_for_gdn(sizes, world)
    assert way == "state" and f"for {world} ranks" in why and why.startswith("state is modelled")
    ratios = [
        costs.seconds_by_heads(sizes, world, tokens) / costs.seconds_by_states(sizes, world, tokens)
        for tokens in (64, 8192, 65536)
    ]
    assert ratios == sorted(ratios)


def test_the_options_name_the_ways_of_the_operations():
    given = {"gdn": get_args(GDN), "attention": get_args(Attention)}
    for op in (delta_rule.OP, attention.OP):
        across = op.across_ranks
        assert sorted({"auto", *across.ways}) == sorted(given.pop(across.option))
    assert given == {}


def test_auto_says_what_it_takes_and_why(group, monkeypatch):
    monkeypatch.setattr(ContextParallel, "world", 2)
    config, auto = tiny().config, ContextParallel(group)
    ops = by_family["qwen3_5"].mixer_ops
    sizes = gdn_sizes() | {"query_heads": 8}
    found = resolve_ways(config, sizes, auto, ops, {})
    assert (found.gdn, found.attention) == ("state", "auto")
    assert "Gated DeltaNet exchanges states (state is modelled at" in str(found)
    # a backend that gives no states
    monkeypatch.setitem(delta_rule.OP.backends, "stateless", delta_rule.DeltaRuleBackend())
    assert resolve_ways(config, sizes, auto, ops, {"delta_rule": "stateless"}).gdn == "heads"
    local = in_way(shard_row(PackedSequence.from_lengths([3]), 0, 1), delta_rule="state")
    with pytest.raises(BackendUnavailable, match="'stateless', which gives no states, .* on .*fla"):
        delta_rule.OP.running("stateless", local)
    # where heads cost less
    monkeypatch.setattr(costs, "seconds_by_heads", lambda *_: 0.0)
    assert resolve_ways(config, sizes, auto, ops, {}).gdn == "heads"
    asked = resolve_ways(config, sizes, ContextParallel(group, gdn="state"), ops, {})
    assert asked.gdn == "state" and "exchanges states (as asked for); " in str(asked)


def test_the_report_says_how_ranks_share(group):
    report = patch_report(apply_patches(tiny(), context_parallel=group))
    assert report.context_parallel.endswith(
        "; attention exchanges heads, or keys and values in rows of short documents"
    )
    assert report.context_parallel in str(report)
    assert patch_report(apply_patches(tiny())).context_parallel == ""
