"""The base of our autograd functions, whose calls take little of the host's time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd import function as by_torch

from hf_packfree.errors import UnsupportedInput
from hf_packfree.packing.compiling import is_transformed


class Operation(Function):
    """A `torch.autograd.Function` whose `apply` takes its arguments as they are.

    Torch's own searches them for tensors that a finished transform of torch.func left behind, at
    every call, of which a step has hundreds: 3.5% of a step of 4,096 tokens on an H200
    (docs/performance.md). Such a tensor has no memory, so that here it raises where its memory is
    read.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """See `torch.autograd.Function.apply`."""
        if is_transformed():
            return super().apply(*args)  # type: ignore[no-untyped-call]
        return super(Function, cls).apply(*args)  # type: ignore[misc]


def once_differentiable(backward: Callable[..., Any]) -> Any:
    """Do what torch's decorator of that name does, where a second derivative can be wanted:
    otherwise gradients are off.
    """
    checked = by_torch.once_differentiable(backward)

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        return (checked if torch.is_grad_enabled() else backward)(ctx, *grads)

    return call


class Transformable(Function):
    """An autograd function in PyTorch that torch.func can differentiate, once; what else it can
    do is refused.
    """

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        """Refuse what would give every row its own tokens and one plan of documents."""
        raise UnsupportedInput(
            "found torch.vmap around a packed row; wanted none; pass rows alone, or as a batch [B, "
            "S]"
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Refuse forward-mode derivatives."""
        raise UnsupportedInput(
            "found forward-mode derivatives of a packed row; wanted backward ones; call "
            "torch.func.grad, vjp or backward()"
        )


def first_derivative(backward: Callable[..., Any]) -> Any:
    """Do for a `Transformable`'s backward what torch's `once_differentiable` does: a second
    derivative raises.

    Under torch.func that one would let it pass, and leave out what goes through this function.
    """
    outside = once_differentiable(backward)

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        return (backward if is_transformed() else outside)(ctx, *grads)

    return call


def without_transforms(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, tensors without a derivative, with arguments that no transform of
    torch.func holds meanwhile.

    A backward pass that changes tensors in place needs it: torch unwraps the arguments of forward
    passes alone.
    """
    if not is_transformed():
        return function(*args)
    return _WithoutTransforms.apply(function, *args)  # type: ignore[no-untyped-call]


class _WithoutTransforms(Transformable):
    @staticmethod
    def forward(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedInput(
            "found a second derivative of a packed row; wanted the first; run the documents in "
            "rows of their own"
        )
