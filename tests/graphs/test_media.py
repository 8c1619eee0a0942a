"""Rows with images and videos in graphs, with the stand-in of `on_cpu`: each document alone,
whatever was in the rows before.
"""

from __future__ import annotations

import copy

import pytest

from hf_packfree import apply_patches
from tests.graphs import on_cpu
from tests.support import GRADIENT_TOL, LOGIT_TOL, errors, runner_of
from tests.vision import (
    alone,
    documents,
    packed_batch,
    padded_batch,
    random_weights,
    run,
    tiny_vision,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("qwen3_5", ""),
        ("qwen3_5_moe", ""),
        ("qwen2_5_vl", ""),
        # image features are added between layers
        ("qwen3_vl", "is given"),
    ],
)
def test_documents_with_media_are_as_alone(family, why, monkeypatch):
    on_cpu.let_capture_whole_documents(monkeypatch)
    unpatched = tiny_vision(family)
    model = apply_patches(copy.deepcopy(unpatched).train(), cuda_graphs="auto")
    given = documents(unpatched.model)
    # rows of equal length, whose documents come in other orders
    orders = given, given[::-1], given[3:] + given[:3]
    for each in orders:
        weights = random_weights(each)
        wanted = alone(unpatched, each, weights)
        for batch in (
            packed_batch("offsets, types", each, unpatched.model),
            padded_batch("right", each),
        ):
            logits, gradients = errors(run(model, batch, weights), wanted)
            assert logits <= LOGIT_TOL and gradients <= GRADIENT_TOL
    runner = runner_of(model)
    assert runner.replayed == (0 if why else 2 * len(orders) - 1), runner.reasons
    assert not why or any(why in reason for reason in runner.reasons)
