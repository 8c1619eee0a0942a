"""What GPU tests share: the recorder of measured errors and outcomes, and full fp32 precision."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.models import pin_kernels, precise_products
from tests.benchmarks.timing import rounded
from tests.support import put_upstream_in_torch

# torch wants it where gradients are added up in one order, and reads it once
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

OUT = os.environ.get("PACKFREE_GPU_OUT")
"""The folder where measured errors and the tests' outcomes are appended, as lines of JSON; none
if not set.
"""


def _append(name: str, line: dict[str, Any]) -> None:
    if OUT:
        with (Path(OUT) / name).open("a") as file:
            file.write(json.dumps(rounded(line)) + "\n")


MISSED = pytest.StashKey[list[str]]()
"""What a test measured and found above its limit."""


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return `record(what, error, limit, **facts)`: writes a measured error; one above its limit,
    or NaN, fails the test.

    The test goes on to its end first, so that every error is written. With `limit` None it only has
    to be finite.
    """
    missed = request.node.stash.setdefault(MISSED, [])

    def measured(what: str, error: float, limit: float | None = None, **facts: Any) -> None:
        _append(
            "errors.jsonl",
            {"test": request.node.name, "what": what, "error": error, "limit": limit, **facts},
        )
        if not error < float("inf") or (limit is not None and not error <= limit):
            missed.append(f"{what}: {error:.2e}, limit {limit}")

    return measured


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that ran to its end with errors above their limits."""
    result = yield
    missed = item.stash.get(MISSED, [])
    if missed:
        pytest.fail("\n".join(missed), pytrace=False)
    return result


@pytest.fixture
def precise() -> Iterator[None]:
    """See `precise_products`."""
    with precise_products():
        yield


@pytest.fixture
def upstream_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference for which nothing tunes for minutes."""
    put_upstream_in_torch(monkeypatch)


@pytest.fixture
def pin(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """See `pin_kernels`."""
    return pin_kernels(monkeypatch)


@pytest.fixture
def untuned(pin: Callable[[str], None]) -> None:
    """In fp32 and fp16 every one of hundreds of shapes compiles for a minute."""
    pin("smallest")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write each test's outcome the moment it is known."""
    if report.when == "call" or report.outcome != "passed":
        reason = "" if report.outcome == "passed" else str(report.longrepr)[-600:]
        _append(
            "tests.jsonl",
            {
                "test": report.nodeid,
                "outcome": report.outcome,
                "s": report.duration,
                "reason": reason,
            },
        )
