"""A product of few rows, padded to as many as need no split-K; that the results then agree bit
for bit is tests/gpu's.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from hf_packfree.ops.fused import linear as module
from hf_packfree.ops.fused.linear import linear_forward, pad_rows
from tests.support import relative_rms


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (255,), (2, 3, 4)], ids=str)
def test_padded_rows_change_nothing(shape):
    torch.manual_seed(0)
    x, weight = (
        torch.randn(*shape, 24, dtype=torch.float64),
        torch.randn(7, 24, dtype=torch.float64),
    )
    found = pad_rows(x, weight)
    assert found.shape == (*shape, 7) and found.is_contiguous() and not found._is_view()
    assert relative_rms(found, linear(x, weight)) < 1e-14
    for batch_invariant in (False, True):
        assert torch.equal(linear_forward(x, weight, batch_invariant), linear(x, weight)), (
            "on a CPU it is the product alone"
        )


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("rows", [1, 1023, 1024])
def test_few_rows_are_padded_for_batch_invariance_alone(rows, batch_invariant, monkeypatch):
    """On a GPU in half precision, which the tensor here says it is."""

    class OnGPU(torch.Tensor):
        is_cuda = True

    padded = []
    monkeypatch.setattr(
        module, "pad_rows", lambda x, weight: padded.append(len(x)) or linear(x, weight)
    )
    x, weight = torch.randn(rows, 4).half().as_subclass(OnGPU), torch.randn(3, 4).half()
    assert linear_forward(x, weight, batch_invariant).shape == (rows, 3)
    assert padded == ([rows] if batch_invariant and rows < 1024 else [])
