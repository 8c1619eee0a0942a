"""Rows that are compared are timed in turns."""

from __future__ import annotations

from tests.benchmarks.timing import Clock


def test_steps_are_timed_in_turns():
    calls: list[str] = []
    found = Clock("cpu", warmup=2, runs=3).in_turns([lambda: calls.append("a"), lambda: calls.append("b")])
    assert calls == [*"aabb", *"ab" * 3]
    assert [result["runs"] for result in found] == [3, 3]


def test_one_step_is_timed_alone():
    calls: list[str] = []
    assert Clock("cpu", warmup=1, runs=2).measure(lambda: calls.append("a"))["runs"] == 2
    assert len(calls) == 3
