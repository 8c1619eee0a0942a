"""Dropout of LoRA's adapters by its kernel, which draws a mask from a seed on the device."""

from __future__ import annotations

import pytest
import torch

from hf_packfree.ops import dropout
from hf_packfree.ops.dropout import drop
from hf_packfree.ops.seeds import Seed

KERNELS = {"drop_out"}
SHAPE, RATE = (129, 67), 0.25


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(dropout, "_BLOCK", 64)
    monkeypatch.setattr(dropout, "_on_a_gpu", lambda x: True)


def seed(base: int, number: int = 3) -> Seed:
    return Seed(torch.tensor([base]), number)


def kept(drawn: Seed, rate: float = RATE, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return drop(torch.ones(shape), drawn, rate) != 0


def test_what_is_kept_is_as_it_was(launched):
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    out, mask = drop(x, seed(7), RATE), kept(seed(7))
    assert torch.equal(out, x * mask) and "drop_out" in launched
    # a gradient, in another dtype and layout
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        other = x.to(dtype).T.contiguous().T
        assert torch.equal(drop(other, seed(7), RATE), other * mask)
    assert not kept(seed(7), 1.0).any() and kept(seed(7), 0.0).all()
    assert drop(torch.full((300,), float("nan")), seed(7), RATE).isnan().all()


def test_masks_have_the_rate_and_know_nothing_of_each_other():
    """Of other seeds, other numbers, and of neighbours in one mask; limits are five deviations."""
    drawn = (seed(7), seed(8), seed(7, 5), seed(2**63 - 1, 2**20 + 1))
    masks = [kept(each).double().flatten() for each in drawn]
    count = masks[0].numel()
    deviation = (RATE * (1 - RATE) / count) ** 0.5
    centred = [mask - (1 - RATE) for mask in masks]
    for number, mask in enumerate(centred):
        assert abs(mask.mean()) < 5 * deviation
        others = [*centred[:number], *(mask.roll(shift) for shift in (1, 2, 64, 67, 128, 256))]
        for other in others:
            covariance = (mask * other).mean() / (RATE * (1 - RATE))
            assert abs(covariance) < 5 / count**0.5


def test_the_gradient_is_dropped_out_where_the_output_is():
    """Values and mean as torch's own dropout, whose numbers are others."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    out = dropout.dropout(x, seed(7), RATE)
    assert torch.allclose(out, x * kept(seed(7)) / (1 - RATE))
    small = x[:4, :9].detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: dropout.dropout(x, seed(7), RATE), small)
    assert not dropout.dropout(x, seed(7), 1.0).any()
