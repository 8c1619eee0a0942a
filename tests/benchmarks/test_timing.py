"""Rows that are compared are timed in turns, and any row can be asked for by its name."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.benchmarks import measure
from tests.benchmarks.timing import Clock


def test_steps_are_timed_in_turns():
    calls: list[str] = []
    found = Clock("cpu", warmup=2, runs=3).in_turns(
        [lambda: calls.append("a"), lambda: calls.append("b")]
    )
    assert calls == [*"aabb", *"ab" * 3]
    assert [result["runs"] for result in found] == [3, 3]


def test_one_step_is_timed_alone():
    calls: list[str] = []
    assert Clock("cpu", warmup=1, runs=2).measure(lambda: calls.append("a"))["runs"] == 2
    assert len(calls) == 3


@pytest.mark.slow
def test_a_name_with_an_apostrophe_is_no_part_of_what_torch_compiles(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["measure", "--list", "--out", str(tmp_path), "--only", "liger's fused loss"]
    )
    assert {row["variant"] for row in measure.main().rows} == {"packfree+liger's fused loss"}
    # where no code is from before
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    assert torch.compile(lambda x: x * 2 + 1)(torch.ones(3)).tolist() == [3, 3, 3]
