"""Statistics of a chunk of logits from one pass, and the gradient in their place."""

from __future__ import annotations

import pytest
import torch

from hf_packfree.ops.loss import Expected, Wanted, linear_log_probs, statistics
from hf_packfree.ops.loss.statistics import Statistics
from tests.support import relative_rms

KERNELS = {"token_statistics", "token_gradient"}
WANTED = [Wanted(), Wanted(entropy=True), Wanted(top1=True), Wanted(True, True, True)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(statistics, "_BLOCK", 64)


def chunk(words, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(7, words, generator=generator)).to(dtype)
    targets = torch.randint(words, (7,), generator=generator)
    targets[2], targets[3], targets[4] = -1, words - 1, 0
    return logits, targets, torch.rand(7, generator=generator) + 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("words", [1, 64, 100, 300])
def test_values_and_gradients(words, dtype, launched):
    logits, targets, inverse = chunk(words, dtype)
    generator = torch.Generator().manual_seed(1)
    g, h = (torch.randn(7, generator=generator) for _ in range(2))
    tolerance = {"rtol": 1e-5 if dtype == torch.float32 else 2**-7, "atol": 5e-6}
    for wanted in WANTED:
        found, best, kept = (*(Statistics.empty(wanted, inverse) for _ in range(2)), logits.clone())
        statistics.triton_measure(kept, targets, inverse, found)
        statistics.measure(logits, targets, inverse, best)
        assert torch.equal(kept, logits)
        for one, other in zip(vars(found).values(), vars(best).values(), strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=2e-6, atol=5e-6)
        for of_entropy in [None, h] if wanted.entropy else [None]:
            given = targets, inverse, best.log_z, best.entropy, g, of_entropy
            one = statistics.triton_differentiate(logits.clone(), *given)
            other = statistics.differentiate(logits.clone(), *given)
            torch.testing.assert_close(one, other, **tolerance)
    assert launched == KERNELS


def test_ties_go_to_the_first():
    logits = torch.zeros(3, 300)
    logits[1, [290, 100]], logits[2, 64:] = 1.0, float("-inf")
    found = Statistics.empty(Wanted(top1=True, entropy=True), torch.ones(3))
    statistics.triton_measure(logits, torch.tensor([0, 100, 3]), torch.ones(3), found)
    assert found.top1.tolist() == [0, 100, 0]
    assert found.entropy[2] == pytest.approx(4.158883, abs=1e-5)


def test_a_target_that_is_no_word_is_not_a_number():
    found = Statistics.empty(Wanted(), torch.ones(2))
    statistics.triton_measure(torch.zeros(2, 8), torch.tensor([8, 3]), torch.ones(2), found)
    assert found.log_probs[0].isnan() and found.log_probs[1] == pytest.approx(-2.0794, abs=1e-4)


def test_far_logits_do_not_overflow():
    logits = torch.tensor([[-1e30, 1e30, 0.0], [float("-inf"), 3.0, 3.0]])
    found = Statistics.empty(Wanted(True, True), torch.ones(2))
    statistics.triton_measure(logits, torch.tensor([1, 2]), torch.ones(2), found)
    assert found.log_probs.tolist() == pytest.approx([0.0, -0.6931], abs=1e-4)
    assert found.entropy.tolist() == pytest.approx([0.0, 0.6931], abs=1e-4)
    given = (
        torch.tensor([1, 2]),
        torch.ones(2),
        found.log_z,
        found.entropy,
        torch.ones(2),
        torch.ones(2),
    )
    gradient = statistics.triton_differentiate(logits, *given)
    assert gradient[0].tolist() == [0.0, 0.0, 0.0]
    assert gradient[1].tolist() == pytest.approx([0.0, -0.5, 0.5], abs=1e-6)


@pytest.mark.parametrize("expected", [Expected(), Expected(uniform=True), Expected(entropy=True)])
def test_the_whole_operation(expected, launched):
    generator = torch.Generator().manual_seed(0)
    x, weight, given = (
        torch.randn(*shape, generator=generator) for shape in ((40, 8), (30, 8), (2, 40))
    )
    x.requires_grad_(), weight.requires_grad_()
    targets = torch.randint(30, (40,), generator=generator).index_fill(
        0, torch.arange(0, 40, 3), -100
    )
    outputs = [
        linear_log_probs(
            x,
            weight,
            targets,
            wanted=Wanted(entropy=True),
            expected=expected,
            temperature=0.7,
            backend=name,
        )
        for name in ("triton", "torch")
    ]
    for ours, theirs in zip(*([one.log_probs, one.entropy] for one in outputs)):
        assert relative_rms(ours, theirs) <= 1e-6
    found, wanted = (
        torch.autograd.grad([one.log_probs, one.entropy], [x, weight], list(given))
        for one in outputs
    )
    for one, other in zip(found, wanted):
        assert relative_rms(one, other) <= 2e-6
    assert launched == KERNELS | {"scaled"}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 20)], ids=str)
def test_one_temperature_as_a_tensor_is_that_of_every_token(shape):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator) for shape in ((1, 20, 8), (30, 8)))
    targets = torch.randint(30, (1, 20), generator=generator)
    found, wanted = (
        linear_log_probs(x, weight, targets, temperature=temperature, backend=name).log_probs
        for temperature, name in ((torch.full(shape, 0.7), "triton"), (0.7, "torch"))
    )
    assert relative_rms(found, wanted) <= 1e-6
