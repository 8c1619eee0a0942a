"""Fused linear cross entropy, and logits that are computed only when something reads them.

In autograd's graph lazy logits are ordinary: the loss reads the logits, the logits read x and the
weight. The loss's backward returns a lazy gradient of the logits that holds the gradients of x and
the weight; its own values are computed only if a hook reads it or another gradient is added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear, one_hot

from hf_packfree.errors import UnsupportedInput
from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.ops.loss.chunked_loss import (
    Gradients,
    LossBackend,
    Targets,
    choose,
    loss_and_gradients,
)
from hf_packfree.ops.loss.elementwise import (
    Elementwise,
    LazyGradient,
    after_steps,
    growth,
    origin_of,
    step_of,
)
from hf_packfree.ops.loss.log_probs import Expected, TokenLogProbs, linear_log_probs
from hf_packfree.ops.loss.misread import refuse_misread, refuse_values
from hf_packfree.ops.loss.scaled import Scaled
from hf_packfree.ops.loss.statistics import Wanted
from hf_packfree.packing import PackedSequence, repad, unpad
from hf_packfree.packing.lazy import Fingerprint, LazyTensor, Origin, Padded

Weights = Callable[[], tuple[Tensor, Tensor | None]]


class LazyLogits(LazyTensor):
    """Logits [B, S, V] of a patched model's packed or padded rows, computed only when read."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Stay lazy through a scale or a cap that the head applies before its loss is called; read
        the values for any other operation.
        """
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and not kwargs and _is_of_a_head(first.source):
            step, source = step_of(func, args), first.source
            if step is not None:
                made = Elementwise(source, step)
                return cls(Origin(source.shape, source.dtype, source.device, made))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def log_probs(
        self,
        targets: Tensor,
        *,
        temperature: float | Tensor = 1.0,
        entropy: bool | Literal["detached"] = False,
        top1: bool = False,
        ignore_index: int = -100,
    ) -> TokenLogProbs:
        """Return the log-probability of given tokens, and more of the same distributions, without
        making the logits.

        Gradients go to the hidden states and the head's weights; hooks on the logits see nothing.
        Every rank calls where FSDP2 shards the head, before the backward pass. Under context
        parallelism the logits, and so the targets, are those of the rank's own tokens.

        Args:
            targets: int64 [B, S]: for every token the one whose log-probability is wanted, as a
                rule the next; those of padding are ignored.
            temperature, entropy, top1, ignore_index: see `hf_packfree.token_log_probs`.

        Raises:
            UnsupportedInput: the logits were read or changed before, or the head's weight or the
                hidden states were changed since; or see `refuse_misread` and `refuse_values`.
        """
        refuse_misread(self.shape[:-1], targets, temperature, entropy)
        product, packed = _origin(self.source)
        x, weight, bias = product.as_given()
        targets = targets.to(x.device)
        if packed is not None:
            targets = unpad(targets, packed)
            if isinstance(temperature, Tensor):
                temperature = unpad(temperature.to(x.device).expand(self.shape[:-1]), packed)
        refuse_values(targets, temperature, len(weight), ignore_index)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.requires_grad):
            found = linear_log_probs(
                x,
                weight,
                targets,
                bias=bias,
                temperature=temperature,
                wanted=Wanted(entropy=bool(entropy), top1=top1),
                expected=Expected(entropy=entropy is True),
                ignore_index=ignore_index,
                backend=product.backend,
            )
        if packed is not None:
            found = found.each(lambda one: repad(one, packed))
        return found.with_detached_entropy() if entropy == "detached" else found


def _is_of_a_head(source: Origin) -> bool:
    """Whether these are unread logits whose head has not called its loss yet."""
    product = origin_of(source)[0].make
    unread = source.values is None and not source.changed
    return unread and isinstance(product, _Product) and product.until_loss


def _origin(source: Origin) -> tuple[_Product, PackedSequence | None]:
    """Return the product that computes the logits, and the record where they are padded to the
    caller's batch.

    Raises:
        UnsupportedInput: the logits were read or changed before, or the head scales or caps them.
    """
    packed: PackedSequence | None = None
    while True:
        make = source.make
        if source.changed or source.values is not None:
            raise UnsupportedInput(
                "found logits that were read or changed before their log_probs were asked for; "
                "wanted them untouched; ask first and pass temperature=..., or compute the "
                "log-probabilities from the logits that are there"
            )
        if isinstance(make, _Product):
            return make, packed
        following = source.cast_of
        if isinstance(make, Elementwise):
            raise UnsupportedInput(
                "found logits that the head scales or caps, asked for their log_probs; wanted its "
                "last layer's own; pass its hidden states to hf_packfree.token_log_probs"
            )
        if isinstance(make, Padded):
            assert isinstance(make.row, LazyTensor)
            packed, following = make.packed, make.row.source
        assert following is not None
        source = following


def lazy_logits(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    reload: Weights | None = None,
    backend: str = "torch",
) -> LazyLogits:
    """Return x weight' + bias, computed when an operation first reads the logits, and kept from
    then on.

    Args:
        x: [..., D].
        weight: [V, D], in x's dtype.
        bias: [V] or None.
        reload: returns weight and bias again where their memory was freed, as FSDP does after a
            forward pass.
        backend: of `LazyLogits.log_probs`, see `linear_log_probs`.

    Returns:
        [..., V] in x's dtype, with the gradients of the product. The first read raises
        `UnsupportedInput` if x, the weight or the bias was changed since, in any way.
    """
    lazy: LazyLogits = _Logits.apply(x, weight, bias, reload)
    product = lazy.source.make
    assert isinstance(product, _Product)
    # the inputs with their graph, which `forward` does not see
    product.given, product.backend = (x, weight, bias), backend
    return lazy


class _Logits(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, reload: Weights | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.product = product = _Product(x, weight, bias, reload)
        return LazyLogits(Origin((*x.shape[:-1], weight.shape[0]), x.dtype, x.device, product))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.product.ended = True
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        onward = None
        if isinstance(grad, LazyTensor) and not grad.source.changed:
            onward = grad.source.onward
        # not for the gradient of another call's logits
        if isinstance(onward, _Onward) and onward.product is ctx.product:
            return *onward(x, weight), None
        flat = grad.flatten(0, -2)
        d_x = (flat @ weight).view_as(x) if needs_x else None
        d_weight = flat.t() @ x.flatten(0, -2) if needs_weight else None
        return d_x, d_weight, flat.sum(0) if needs_bias else None, None


class _Product:
    """Computes the logits of the forward pass later, from its x, weight and bias, without a graph.

    It holds detached tensors, so that assigning a parameter's `.data` later, or moving it to
    another dtype or device, changes nothing here.
    """

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, reload: Weights | None
    ) -> None:
        parts = [one for one in (x, weight, bias) if one is not None]
        has_bias = bias is not None and bias.requires_grad
        self.needed = x.requires_grad, weight.requires_grad, has_bias
        self.x, self.weights = x.detach(), [one.detach() for one in parts[1:]]
        self.before = [Fingerprint.of(one) for one in parts]
        self.reload, self.backend = reload, "torch"
        self.given = x, weight, bias
        # whether the backward pass has run, after which the weights may be others
        self.ended = False
        # whether a scale or cap of the logits is the head's, on the way to its loss
        self.until_loss = False

    def __call__(self) -> Tensor:
        """Return the logits [..., V]."""
        of_x, *before = self.before
        weights, same = self.weights, of_x.fits(self.x)
        if _are_freed(weights):
            weights = [] if self.ended or self.reload is None else self._reloaded()
            same &= len(weights) == len(before) and all(map(Fingerprint.fits_copy, before, weights))
        else:
            same &= all(map(Fingerprint.fits, before, weights))
        if not same:
            raise _too_late()
        with torch.no_grad(), torch.autocast(self.x.device.type, enabled=False):
            return linear(self.x, *weights)

    def as_given(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return x, the weight and the bias with their graph; gathered again where FSDP2 freed
        their memory.

        Raises:
            UnsupportedInput: one of them was changed since.
        """
        held = [self.x, *self.weights]
        if self.reload is not None and _are_freed(held[1:]):
            weight, *biases = self._reloaded()
            bias, found = (biases[0] if biases else None), [self.x, weight, *biases]
            if self.ended or not all(map(Fingerprint.fits_copy, self.before, found)):
                raise _too_late()
            return self.given[0], weight, bias
        now = [one for one in self.given if one is not None]
        same = not _are_freed(held) and all(
            one.data_ptr() == other.data_ptr() and one.dtype == other.dtype
            for one, other in zip(held, now, strict=True)
        )
        if not (same and all(map(Fingerprint.fits, self.before, held))):
            raise _too_late()
        return self.given

    def _reloaded(self) -> list[Tensor]:
        """Return the weights again, with their graph; a collective: every rank calls this."""
        assert self.reload is not None
        found = [one for one in self.reload() if one is not None]
        # FSDP1 gathers what it freed in its own forward and backward pass alone
        if _are_freed(found):
            raise _too_late()
        return [one.to(self.x.dtype) for one in found]


def _are_freed(tensors: Iterable[Tensor]) -> bool:
    return any(one.untyped_storage().size() == 0 for one in tensors)


def _too_late() -> UnsupportedInput:
    return UnsupportedInput(
        "found logits read for the first time after the head's weight, or the hidden "
        "states before it, were changed (an optimizer's step, an average of weights, "
        "another operation in place) or, with FSDP, after the backward pass, with FSDP1 after it "
        "freed that weight; wanted them read before, for they are computed then; read them "
        "earlier, or patch with backend={'loss': 'upstream'}"
    )


def head_scales(logits: LazyTensor, scales: bool) -> None:
    """Set whether multiplying or dividing the result of `lazy_logits` by a number, or its tanh, is
    a step of the head before a loss that `loss_of` computes; the results are then lazy too.
    """
    product = logits.source.make
    assert isinstance(product, _Product)
    product.until_loss = scales


def scaled_from(found: Any, logits: LazyTensor) -> bool:
    """Whether `found` is the unchanged result of a head's steps on these lazy logits, which may be
    widened last.
    """
    if not isinstance(found, LazyLogits) or found.source.changed:
        return False
    return origin_of(found.source.not_widened)[0] is logits.source


def loss_of(logits: Tensor, targets: Targets, backend: LossBackend) -> Tensor:
    """Return the sum of the cross entropies, an fp32 scalar, of logits [..., V] from `lazy_logits`,
    with or without a head's steps (see `Elementwise`).
    """
    total: Tensor = _CrossEntropy.apply(logits, targets, backend)
    return total


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: LazyTensor, targets: Targets, backend: LossBackend) -> Tensor:
        source, steps = origin_of(logits.source.not_widened)
        product = source.make
        assert isinstance(product, _Product) and backend.softmax_gradient is not None
        needed = product.needed if ctx.needs_input_grad[0] else (False, False, False)
        flat, some, chosen = choose(product.x.flatten(0, -2), targets)
        weight, *bias = product.weights
        total, found = loss_and_gradients(
            flat,
            weight,
            bias[0] if bias else None,
            some,
            needed,
            after_steps(backend.softmax_gradient, steps),
            growth(steps),
        )
        ctx.save_for_backward(found.x, found.weight, found.bias)
        ctx.factor, ctx.make, ctx.targets, ctx.chosen = (
            found.factor,
            logits.source.make,
            targets,
            chosen,
        )
        ctx.steps, ctx.product, ctx.scaled = steps, product, backend.scaled
        ctx.like = logits.shape, logits.dtype, logits.device
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        d_x, d_weight, d_bias = ctx.saved_tensors
        found = Gradients(d_x, d_weight, d_bias, ctx.factor)
        make, targets, chosen = ctx.make, ctx.targets.flat, ctx.chosen
        shape, dtype, device = ctx.like
        source = Origin(shape, dtype, device, lambda: _gradient(make(), targets, grad))
        onward = _Onward(ctx.product, found, grad, chosen, ctx.scaled)
        gradient = LazyGradient.of(source, ctx.steps, onward)
        return gradient, None, None


def _gradient(logits: Tensor, targets: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the logits [..., V], given that of the loss, a scalar."""
    has = (targets >= 0)[:, None]
    hot = one_hot(targets.clamp(min=0), logits.shape[-1])
    d_logits = (logits.flatten(0, -2).float().softmax(-1) - hot) * has * grad
    return d_logits.to(logits.dtype).view_as(logits)


@dataclass(frozen=True, eq=False)
class _Onward:
    """The gradients that follow from a lazy gradient of logits, without its values.

    Attributes:
        product: the product that computes the logits.
        found: the loss's gradients, before `grad`.
        grad: of the loss, a scalar.
        chosen: see `choose`.
        scaled: of the backend that made them.
    """

    product: _Product
    found: Gradients
    grad: Tensor
    chosen: Tensor | None
    scaled: Scaled

    def __call__(self, x: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias."""
        found, factor, d_x = self.found, self.grad * self.found.factor, None
        if found.x is not None:
            d_x = self.scaled(found.x, factor, x)
            if self.chosen is not None:
                d_x = x.new_zeros(x.shape).flatten(0, -2).index_copy_(0, self.chosen, d_x)
            d_x = d_x.view_as(x)
        d_weight, d_bias = (
            None if one is None else self.scaled(one, factor, weight)
            for one in (found.weight, found.bias)
        )
        return d_x, d_weight, d_bias
