"""What tests of whole models share."""

from __future__ import annotations

import pytest

from tests.support import widen


@pytest.fixture
def widened(monkeypatch):
    """In fp64 what transformers computes in fp32 whatever the weights: see `widen`."""
    widen(monkeypatch)
