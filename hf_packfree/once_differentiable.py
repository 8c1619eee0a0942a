"""A decorator for backward passes without a second derivative, which raises when a second
derivative is taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hf_packfree.errors import UnsupportedInput


def once_differentiable(backward: Callable[..., Any]) -> Any:
    """Run a backward pass without recording a graph; differentiating the gradients that it returns
    raises `UnsupportedInput`.

    torch's decorator of the same name raises with torch's own message, and only if the incoming
    gradient has a graph. Without one, as for the gradient of a plain sum, it leaves out a part of
    the second derivative silently.
    """

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        # create_graph=True
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        gradients = found if isinstance(found, tuple) else (found,)
        given = [one for one in (*grads, *ctx.saved_tensors) if one is not None]
        return _Last.apply(gradients, torch.ones((), requires_grad=True), *given)

    return call


class _Last(Function):
    """Returns gradients that depend on the given tensors in autograd's graph, and whose backward
    raises.
    """

    @staticmethod
    def forward(ctx: Any, gradients: tuple[Any, ...], *given: Tensor) -> tuple[Any, ...]:
        """Return the gradients, with the tensors in `given` as their inputs in the graph."""
        return gradients

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedInput(
            "found a second derivative of a packed row (create_graph=True); wanted the first; run "
            "the documents in rows of their own, on an unpatched model"
        )
