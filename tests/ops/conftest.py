"""The operations' tests run on one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hf_packfree.ops.loss import chunked_loss


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread, or as many as the test's parameter says: tiny tensors gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request, "param", 1))
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of logits has 32 tokens of 50 words."""
    monkeypatch.setattr(chunked_loss, "_ELEMENTS_ELSEWHERE", 32 * 50)
    monkeypatch.setattr(chunked_loss, "_FEWEST", 1)
