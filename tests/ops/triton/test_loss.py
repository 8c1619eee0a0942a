"""The softmax of a chunk of logits, and its gradient in their place."""

from __future__ import annotations

import pytest
import torch

from hf_packfree.ops.loss import linear_cross_entropy, softmax
from hf_packfree.ops.loss.elementwise import Step, after_steps
from tests.support import relative_rms

KERNELS = {"softmax_gradient"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("words", [1, 64, 100, 300])
def test_values_and_gradients(words, dtype, launched, monkeypatch):
    monkeypatch.setattr(softmax, "_BLOCK", 64)
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(7, words, generator=generator)).to(dtype)
    targets = torch.randint(words, (7,), generator=generator)
    targets[2], targets[3], targets[4] = -1, words - 1, 0
    wanted = softmax.softmax_gradient(logits.clone(), targets, 4.0)
    losses, gradient = softmax.triton_softmax_gradient(logits.clone(), targets, 4.0)
    torch.testing.assert_close(losses, wanted[0], rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(
        gradient, wanted[1], rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=2e-6
    )
    kept = logits.clone()
    alone = softmax.triton_softmax_gradient(kept, targets, None)
    assert alone[1] is None and torch.equal(alone[0], losses) and torch.equal(kept, logits)
    assert launched == KERNELS


def test_a_target_that_is_no_word_is_not_a_number():
    losses, _ = softmax.triton_softmax_gradient(torch.zeros(2, 8), torch.tensor([8, 3]), None)
    assert losses[0].isnan() and losses[1] == pytest.approx(2.0794, abs=1e-4)


def test_far_logits_do_not_overflow():
    logits = torch.tensor([[-1e30, 1e30, 0.0], [float("-inf"), 3.0, 3.0]])
    losses, gradient = softmax.triton_softmax_gradient(logits, torch.tensor([1, 2]), 1.0)
    assert losses.tolist() == pytest.approx([0.0, 0.6931], abs=1e-4)
    assert gradient[0].tolist() == [0.0, 0.0, 0.0] and gradient[1].tolist() == pytest.approx(
        [0.0, 0.5, -0.5]
    )


def test_the_whole_operation():
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(*shape, generator=generator).requires_grad_() for shape in ((40, 8), (30, 8))
    )
    targets = torch.randint(30, (40,), generator=generator)
    losses = (
        linear_cross_entropy(x, weight, targets, backend=name) for name in ("triton", "upstream")
    )
    ours, theirs = (torch.autograd.grad(loss, [x, weight]) for loss in losses)
    for found, wanted in zip(ours, theirs):
        assert relative_rms(found, wanted) <= 1e-6


@pytest.mark.parametrize("capped", [False, True], ids=["scaled", "capped"])
def test_what_a_head_does_between_product_and_loss(capped, launched):
    """The kernel overwrites what it reads, which the way back must not need."""
    torch.manual_seed(0)
    div, mul, tanh = (getattr(torch.ops.aten, one) for one in ("div", "mul", "tanh"))
    steps = (Step(div.Tensor, (3.0,)),)
    if capped:
        steps = (Step(div.Tensor, (0.5,)), Step(tanh.default, ()), Step(mul.Tensor, (0.5,)))
    logits, targets = 2 * torch.randn(7, 100), torch.randint(100, (7,))
    leaf = logits.clone().requires_grad_()
    made = (leaf / 0.5).tanh() * 0.5 if capped else leaf / 3.0
    wanted = torch.nn.functional.cross_entropy(made, targets, reduction="none")
    (gradient,) = torch.autograd.grad(wanted.sum(), leaf)
    found = after_steps(softmax.triton_softmax_gradient, steps)(logits, targets, 1.0)
    torch.testing.assert_close(found[0], wanted.detach(), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(found[1], gradient, rtol=1e-5, atol=2e-6)
    assert launched == KERNELS
