"""A product of few rows, padded to as many as need no split-K; that the results then agree bit for bit is tests/gpu's."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from hf_packfree.ops.fused.linear import linear_forward, pad_rows
from tests.support import relative_rms


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (255,), (2, 3, 4)], ids=str)
def test_padded_rows_change_nothing(shape):
    torch.manual_seed(0)
    x, weight = torch.randn(*shape, 24, dtype=torch.float64), torch.randn(7, 24, dtype=torch.float64)
    found = pad_rows(x, weight)
    assert found.shape == (*shape, 7) and found.is_contiguous()
    assert relative_rms(found, linear(x, weight)) < 1e-14
    for batch_invariant in (False, True):
        assert torch.equal(linear_forward(x, weight, batch_invariant), linear(x, weight)), "on a CPU it is the product alone"
