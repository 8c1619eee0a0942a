"""Logits that nobody made yet, and the cross entropy that does without them.

To autograd they are there: the loss is computed from the logits, and these from x and the weight.
The loss hands on a lazy gradient of the logits that carries the gradients of x and the weight with
it, and whoever looks at it, as hooks do, or adds another gradient to it, makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear, one_hot

from hf_packfree.errors import UnsupportedInput
from hf_packfree.ops.loss.chunks import Gradients, Targets, choose, loss_and_gradients, scaled
from hf_packfree.ops.loss.softmax import SoftmaxGradient
from hf_packfree.packing.lazy import LazyTensor, Source

Weights = Callable[[], tuple[Tensor, Tensor | None]]


class LazyLogits(LazyTensor):
    """Logits [..., V] of a linear layer that multiplies when something reads them."""

    inputs: tuple[Tensor, Tensor, Tensor | None] | None = None
    """x [..., D], weight [V, D] and bias [V], with their histories; of the tensor that
    `lazy_logits` returns alone.
    """

    def before_any_change(self) -> bool:
        """Whether they are what `inputs` say."""
        return self.inputs is not None and self._version == 0


def lazy_logits(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, reload: Weights | None = None
) -> Tensor:
    """Return x weight' + bias, computed when an operation first reads it and kept from then on.

    Args:
        x: [..., D].
        weight: [V, D], in x's dtype.
        bias: [V] or None.
        reload: returns the weights where their memory was given up meanwhile, as FSDP does after a
            forward pass.

    Returns:
        [..., V], with the gradients of the product. Reading it raises `UnsupportedInput` after the
        weight was changed.
    """
    lazy: LazyLogits = _Logits.apply(x, weight, bias, reload)  # type: ignore[no-untyped-call]
    lazy.inputs = x, weight, bias
    return lazy


class _Logits(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, reload: Weights | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        make = _Product(x.detach(), weight, bias, reload)
        return LazyLogits(Source((*x.shape[:-1], weight.shape[0]), x.dtype, x.device, make))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        known = (
            vars(grad).get("known")
            if isinstance(grad, LazyTensor) and not grad.source.changed
            else None
        )
        if known is not None:
            return *known(x, weight), None
        flat = grad.flatten(0, -2)
        d_x = (flat @ weight).view_as(x) if needs_x else None
        d_weight = flat.t() @ x.flatten(0, -2) if needs_weight else None
        return d_x, d_weight, flat.sum(0) if needs_bias else None, None


class _Product:
    """Computes logits from weights that are still those of the forward pass, without a history."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, reload: Weights | None
    ) -> None:
        self.x, self.weight, self.bias, self.reload, self.version = (
            x,
            weight,
            bias,
            reload,
            weight._version,
        )
        # the backward pass was here, after which other weights may be loaded
        self.ended = False

    def __call__(self) -> Tensor:
        """Return them."""
        weight, bias, given_up = self.weight, self.bias, self.weight.untyped_storage().size() == 0
        if weight._version != self.version or given_up and (self.ended or self.reload is None):
            raise UnsupportedInput(
                "found logits read after the head's weight was changed in place (an optimizer's "
                "step) or, with FSDP, after the backward pass; wanted them read before, for they "
                "are computed then; read them earlier, or patch with backend={'loss': 'upstream'}"
            )
        if given_up and self.reload is not None:
            weight, bias = self.reload()
        with torch.no_grad(), torch.autocast(self.x.device.type, enabled=False):
            return linear(self.x, weight, bias)


def loss_of(logits: Tensor, targets: Targets, softmax_gradient: SoftmaxGradient) -> Tensor:
    """Return the sum of the cross entropies, an fp32 scalar, of logits [..., V] that
    `lazy_logits` returned.
    """
    assert isinstance(logits, LazyLogits) and logits.inputs is not None
    total: Tensor = _CrossEntropy.apply(logits, logits.inputs, targets, softmax_gradient)  # type: ignore[no-untyped-call]
    return total


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: LazyLogits,
        inputs: tuple[Tensor, ...],
        targets: Targets,
        softmax_gradient: SoftmaxGradient,
    ) -> Tensor:
        x, weight, bias = inputs
        wanted = [
            ctx.needs_input_grad[0] and one is not None and one.requires_grad for one in inputs
        ]
        flat, some, chosen = choose(x.detach().flatten(0, -2), targets)
        total, found = loss_and_gradients(flat, weight, bias, some, tuple(wanted), softmax_gradient)  # type: ignore[arg-type]
        ctx.save_for_backward(found.x, found.weight, found.bias)
        ctx.inputs, ctx.targets, ctx.chosen = inputs, targets.flat, chosen
        ctx.factor, ctx.make = found.factor, logits.source.make
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (grad,), (x, weight, bias) = grads, ctx.inputs
        # a second derivative may be wanted
        if torch.is_grad_enabled():
            return _gradient(linear(x, weight, bias), ctx.targets, grad), None, None, None
        d_x, d_weight, d_bias = ctx.saved_tensors
        found = Gradients(d_x, d_weight, d_bias, ctx.factor)
        make, targets, chosen, ctx.make.ended = ctx.make, ctx.targets, ctx.chosen, True
        shape = (*x.shape[:-1], weight.shape[0])
        lazy = LazyTensor(
            Source(shape, x.dtype, x.device, lambda: _gradient(make(), targets, grad))
        )
        lazy.known = lambda x, weight: _multiplied(found, grad, x, weight, chosen)  # type: ignore[attr-defined]
        return lazy, None, None, None


def _gradient(logits: Tensor, targets: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the logits [..., V], in PyTorch that can be differentiated."""
    has = (targets >= 0)[:, None]
    hot = one_hot(targets.clamp(min=0), logits.shape[-1])
    d_logits = (logits.flatten(0, -2).float().softmax(-1) - hot) * has * grad
    return d_logits.to(logits.dtype).view_as(logits)


def _multiplied(
    found: Gradients, grad: Tensor, x: Tensor, weight: Tensor, chosen: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight and bias for that of the loss."""
    factor, d_x = grad * found.factor, None
    if found.x is not None:
        d_x = scaled(found.x, factor, x)
        if chosen is not None:
            d_x = x.new_zeros(x.shape).flatten(0, -2).index_copy_(0, chosen, d_x)
        d_x = d_x.view_as(x)
    d_weight, d_bias = (
        None if one is None else scaled(one, factor, weight) for one in (found.weight, found.bias)
    )
    return d_x, d_weight, d_bias


__all__ = ["LazyLogits", "lazy_logits", "loss_of"]
