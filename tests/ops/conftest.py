"""The operations' tests run on one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread, or as many as the test's parameter says: tiny tensors gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request, "param", 1))
    yield
    torch.set_num_threads(before)
