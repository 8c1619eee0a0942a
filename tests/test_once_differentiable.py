"""A second derivative is refused by name, wherever autograd would look for it."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Function, grad

from hf_packfree.errors import UnsupportedInput
from hf_packfree.once_differentiable import once_differentiable


class Cubed(Function):
    @staticmethod
    def forward(ctx, x, unused):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * d_out, None


class ByTorch(Function):
    forward = Cubed.forward

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        return Cubed.backward.__wrapped__(ctx, d_out)


def penalty(function, x):
    """By a plain sum: the gradient that comes in has no graph."""
    (first,) = grad(function.apply(x, None).sum(), x, create_graph=True)
    return first


def test_the_first_is_there_with_or_without_a_graph():
    x = torch.arange(4.0, requires_grad=True)
    found = penalty(Cubed, x)
    assert torch.equal(found, 3 * x.detach() ** 2) and found.requires_grad
    assert torch.equal(grad(Cubed.apply(x, None).sum(), x)[0], found)


@pytest.mark.parametrize(
    "ask",
    [
        lambda first, x: first.sum().backward(),
        lambda first, x: grad(first.sum(), x),
        lambda first, x: grad(first.sum() + x.sum(), x, allow_unused=True),
    ],
    ids=["backward", "grad", "beside another term"],
)
def test_the_second_is_refused(ask):
    x = torch.arange(4.0, requires_grad=True)
    with pytest.raises(UnsupportedInput, match="found a second derivative"):
        ask(penalty(Cubed, x), x)


def test_torchs_own_decorator_leaves_it_out():
    """Why there is one of ours."""
    x = torch.arange(4.0, requires_grad=True)
    assert not penalty(ByTorch, x).requires_grad
