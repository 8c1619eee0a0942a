"""Metadata costs nothing per layer: a forward makes one record, and plans for all its layers
once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from hf_packfree import apply_patches
from hf_packfree.ops import delta_rule, fla_support
from hf_packfree.packing import PackedSequence
from tests.support import checkpoint_layers, tiny


@pytest.fixture
def counted(monkeypatch):
    """Counters of the records made, and of what was planned for them; FLA's plan is wanted at
    every delta rule.
    """
    made, planned = Counter(), Counter()
    make, cached, rule = (
        PackedSequence.from_lengths.__func__,
        PackedSequence.cached,
        delta_rule.OP.backends["torch"],
    )

    def counting(cls, *arguments, **words):
        made["records"] += 1
        return make(cls, *arguments, **words)

    def deriving(packed, build, *arguments):
        def built(packed, *arguments):
            planned[build.__qualname__, arguments] += 1
            return build(packed, *arguments)

        built.__code__ = built.__code__.replace(
            co_filename=build.__code__.co_filename, co_firstlineno=build.__code__.co_firstlineno
        )
        planned["wanted"] += 1
        return cached(packed, built, *arguments)

    def run(q, k, v, g, beta, packed, qk_l2norm):
        assert fla_support.chunk_indices(packed)["chunk_indices"].shape[1] == 2
        return rule.run(q, k, v, g, beta, packed, qk_l2norm)

    monkeypatch.setattr(PackedSequence, "from_lengths", classmethod(counting))
    monkeypatch.setattr(PackedSequence, "cached", deriving)
    monkeypatch.setitem(delta_rule.OP.backends, "torch", replace(rule, run=run))
    return made, planned


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_a_step_makes_one_record_and_every_plan_once(counted, checkpointing):
    made, planned = counted
    model = apply_patches(tiny("qwen3_5"))
    if checkpointing:
        checkpoint_layers(model, False)
    made.clear(), planned.clear()
    positions = torch.cat([torch.arange(length) for length in (5, 64, 1, 70)])[None]
    model(
        input_ids=torch.randint(2, 100, positions.shape), position_ids=positions
    ).logits.sum().backward()
    assert made["records"] == 1
    wanted = planned.pop("wanted")
    assert ("plan_chunks", (64,)) in planned and set(planned.values()) == {1}, planned
    assert wanted > 2 * len(planned), "no layer wanted one again, so that nothing was shown"
