"""The softmax of a chunk of logits, and its gradient in their place."""

from __future__ import annotations

import pytest
import torch

from hf_packfree.ops.loss import linear_cross_entropy, softmax
from hf_packfree.ops.loss.elementwise import LogitStep, after_steps, head_of
from hf_packfree.ops.loss.scaled import triton_scaled
from tests.support import relative_rms

KERNELS = {"softmax_gradient", "scaled"}


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
    assert launched == {"softmax_gradient"}


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


def test_the_whole_operation(launched):
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
    assert launched == KERNELS


DIV, MUL, TANH = (torch.ops.aten.div.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.tanh.default)
HEADS = {
    "divided": [(DIV, (3.0,))],
    "multiplied": [(MUL, (-0.7,))],
    "bent": [(TANH, ())],
    "capped": [(DIV, (0.5,)), (TANH, ()), (MUL, (0.5,))],
    "multiplied, bent": [(MUL, (0.3,)), (TANH, ())],
    "bent, multiplied": [(TANH, ()), (MUL, (4.0,))],
    "multiplied twice": [(MUL, (0.3,)), (MUL, (7.0,))],
    "bent twice": [(TANH, ()), (TANH, ())],
}


# the interpreter cuts bf16 off instead of rounding it; a GPU test has bf16
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", HEADS)
def test_what_a_head_does_between_product_and_loss(name, dtype, launched, monkeypatch):
    """Rounded as PyTorch rounds it; the kernel overwrites what it reads, which the way back must
    not need.
    """
    monkeypatch.setattr(softmax, "_BLOCK", 64)
    generator = torch.Generator().manual_seed(0)
    steps = tuple(LogitStep(*step) for step in HEADS[name])
    logits = (2 * torch.randn(7, 100, generator=generator)).to(dtype)
    targets = torch.randint(100, (7,), generator=generator)
    targets[2] = -1
    leaf = made = logits.clone().requires_grad_()
    for step in steps:
        made = step.function(made, *step.numbers)
    made = made.float()
    wanted = torch.nn.functional.cross_entropy(made, targets, reduction="none", ignore_index=-1)
    # from the rounded values on in fp32, which the kernel rounds once
    (gradient,) = torch.autograd.grad(wanted.sum(), leaf)
    fused = "twice" not in name
    assert (head_of(steps) is not None) == fused
    found = after_steps(softmax.triton_softmax_gradient, steps)(logits.clone(), targets, 1.0)
    torch.testing.assert_close(found[0], wanted.detach(), rtol=1e-6, atol=2e-6)
    exact = dtype == torch.float32
    torch.testing.assert_close(
        found[1], gradient, rtol=1e-5 if exact else 2**-6, atol=2e-6 if exact else 2**-12
    )
    alone = after_steps(softmax.triton_softmax_gradient, steps)(logits.clone(), targets, None)
    assert alone[1] is None and torch.equal(alone[0], found[0])
    assert launched == {"softmax_gradient"}


def test_a_heads_integers_are_floats_to_the_kernel():
    """It would be compiled once more for them, and for every kind of integer."""
    steps = LogitStep(DIV, (8,)), LogitStep(TANH, ()), LogitStep(MUL, (16,))
    head = head_of(steps)
    assert head == (0.125, True, 16.0)
    assert type(head.before) is type(head.after) is float


def test_a_head_leaves_no_large_logits():
    """What is beyond a cap is the cap, with a gradient of zero."""
    logits = torch.tensor([[1e30, -1e30, 3.0, 0.0]])
    head = softmax.LogitScaling(before=1 / 30.0, capped=True, after=30.0)
    losses, gradient = softmax.triton_softmax_gradient(logits, torch.tensor([2]), 1.0, head)
    assert losses.tolist() == pytest.approx([27.01], abs=1e-2)
    assert gradient[0, :2].tolist() == [0.0, 0.0] and gradient[0, 2] < -0.9


# the interpreter cuts bf16 off instead of rounding it; a GPU test has bf16
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(3, 4096), (70, 117), (1, 1), (0, 8)])
def test_gradients_times_a_scalar(shape, dtype, launched):
    """Rounded once, whatever the number of blocks; per row, and of doubles, in PyTorch."""
    generator = torch.Generator().manual_seed(0)
    gradient, like = torch.randn(*shape, generator=generator), torch.empty(0, dtype=dtype)
    factor = torch.tensor(0.3)
    found = triton_scaled(gradient, factor, like)
    assert torch.equal(found, (gradient * factor).to(dtype))
    assert launched == ({"scaled"} if gradient.numel() else set())
    launched.clear()
    for rows in (torch.rand(shape[0], 1, generator=generator), factor):
        wide = gradient if rows.ndim else gradient.double()
        assert torch.equal(triton_scaled(wide, rows, like), (wide * rows).to(dtype))
    assert not launched
