"""The Triton kernels run on the CPU, in Triton's interpreter, which tests/conftest.py chooses
where there is no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ops.triton.kernels import Recorded, all_kernels

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is interpreted is slow; `.ci/run kernels` runs it with the oldest Triton and the newest."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)


def reason_to_skip() -> str | None:
    """Why the interpreter cannot run."""
    if find_spec("triton") is None:
        return "triton is not installed; pip install triton (it runs on CPUs here)"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return (
            "a GPU is here, for which kernels are compiled; run TRITON_INTERPRET=1 python -m "
            "pytest tests/ops/triton"
        )
    return None


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    """Skip what cannot run, but fail in CI; overflows, which a GPU passes over in silence, are
    no warnings of NumPy's here.
    """
    if (reason := reason_to_skip()) is not None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill what `torch.empty` and its kin return with NaN, and integers with their maximum: no
    kernel may rely on zeros.
    """
    torch.use_deterministic_algorithms(True)
    assert (
        torch.utils.deterministic.fill_uninitialized_memory
        and torch.empty(3).new_empty(5).isnan().all()
    )
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def few_partial_sums(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let blocks of partial sums be small, since the interpreter adds their rows one after
    another.
    """
    monkeypatch.setattr(
        import_module("hf_packfree.ops.fused.reduce"), "_TILES", ((16, 8), (16, 128))
    )


@pytest.fixture
def launched(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the kernels that the test has launched."""
    names: set[str] = set()
    for name, module in all_kernels().items():
        found = import_module(module)
        monkeypatch.setattr(found, name, Recorded(name, getattr(found, name), names))
    return names


@pytest.fixture
def short_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolution's programs have 16 tokens: the interpreter takes every strip to its end."""
    monkeypatch.setattr(import_module("hf_packfree.ops.conv.triton_native"), "_STRIP", 16)


@pytest.fixture
def rounds_to_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter round to the nearest bf16 as a GPU does, where it cuts off."""
    tl = pytest.importorskip("triton.language")
    from triton.runtime import interpreter

    cut = interpreter._convert_float

    def nearest(x, source, to, mode):
        if (source, to) != (tl.float32, tl.bfloat16):
            return cut(x, source, to, mode)
        return (
            torch.from_numpy(x.copy()).to(torch.bfloat16).view(torch.int16).numpy().view("uint16")
        )

    monkeypatch.setattr(interpreter, "_convert_float", nearest)
