"""Elementwise steps between a head's last layer and the loss: a scale (Granite, Cohere, Falcon-H1),
a cap (Gemma).

The chunked loss applies the steps to its chunks, so that scaled or capped logits need not be
computed either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor

from hf_packfree.errors import UnsupportedInput
from hf_packfree.ops.loss.softmax import LogitScaling, SoftmaxGradient, triton_softmax_gradient
from hf_packfree.packing.lazy import CAST, LazyTensor, Origin

_TANH = torch.ops.aten.tanh.default
_TANH_BACKWARD = torch.ops.aten.tanh_backward.default
_BY_A_NUMBER = torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor


@dataclass(frozen=True)
class LogitStep:
    """One operation on every logit.

    Attributes:
        function: torch's multiplication or division by a number, or its tanh.
        numbers: the number; empty for tanh.
    """

    function: Any
    numbers: tuple[float, ...]

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the step's result, a new tensor."""
        found: Tensor = self.function(logits, *self.numbers)
        return found

    def backward(self, gradient: Tensor, result: Tensor) -> Tensor:
        """Return the gradient of the step's input, given that of its `result`."""
        if self.function is _TANH:
            return _TANH_BACKWARD(gradient, result)  # type: ignore[no-any-return]
        return self(gradient)

    @property
    def factor(self) -> float:
        """The factor on logits; 1 for tanh."""
        if self.function is _TANH:
            return 1.0
        (number,) = self.numbers
        if self.function is torch.ops.aten.mul.Tensor:
            # a float, because Triton would compile another kernel for an integer
            return float(number)
        return 1 / number if number else float("inf")

    @property
    def slope(self) -> float:
        """Bound of the factor by which `backward` enlarges a gradient, at most 2**30."""
        return min(abs(self.factor), 2.0**30)

    def is_undone_by(self, func: Any, args: Any) -> bool:
        """Whether an operation is the one that autograd calls for the step's gradient."""
        wanted = _TANH_BACKWARD if self.function is _TANH else self.function
        return func is wanted and (self.function is _TANH or args[1:] == self.numbers)


def step_of(func: Any, args: Any) -> LogitStep | None:
    """Return an operation on its first argument as a step; None if it is not a scale by a number or
    tanh.
    """
    numbers = args[1:]
    of_numbers = func in _BY_A_NUMBER and all(isinstance(one, int | float) for one in numbers)
    return LogitStep(func, numbers) if of_numbers or func is _TANH else None


@dataclass(frozen=True, eq=False)
class Elementwise:
    """Computes logits after a step from those before it.

    Attributes:
        before: the source of the logits before the step.
        step: the operation.
    """

    before: Origin
    step: LogitStep

    def __call__(self) -> Tensor:
        """Return the logits after the step; unread logits before the step are computed for it and
        not kept.

        Raises:
            UnsupportedInput: the logits before the step were changed in place.
        """
        if self.before.changed:
            raise UnsupportedInput(
                "found logits changed in place before what a head makes of them was read; wanted "
                "them unchanged; read the model's own logits first, or patch with "
                "backend={'loss': 'upstream'}"
            )
        made = self.before.make() if self.before.values is None else self.before.values
        return self.step(made)


def origin_of(source: Origin) -> tuple[Origin, tuple[LogitStep, ...]]:
    """Return the source of the head's product, and the steps from the product to the logits of
    `source`.
    """
    steps: tuple[LogitStep, ...] = ()
    while isinstance(made := source.make, Elementwise):
        source, steps = made.before, (made.step, *steps)
    return source, steps


def growth(steps: tuple[LogitStep, ...]) -> float:
    """Return a bound of the factor by which the steps' backward enlarges a gradient."""
    return max(accumulate((step.slope for step in reversed(steps)), mul, initial=1.0))


_FACTOR_TANH_FACTOR = (
    (False,),
    (True,),
    (False, True),
    (True, False),
    (False, True, False),
)
"""Sequences of steps that a `LogitScaling` describes: whether each step is a tanh."""


def head_of(steps: tuple[LogitStep, ...]) -> LogitScaling | None:
    """Return the steps as a `LogitScaling`: a factor, a tanh and another factor, each of which may
    be missing; None for other sequences.
    """
    tanhs = tuple(step.function is _TANH for step in steps)
    if tanhs not in _FACTOR_TANH_FACTOR:
        return None
    return LogitScaling(steps[0].factor, any(tanhs), steps[-1].factor if any(tanhs) else 1.0)


def after_steps(softmax_gradient: SoftmaxGradient, steps: tuple[LogitStep, ...]) -> SoftmaxGradient:
    """Return a function like `softmax_gradient` of the head's product: the losses are those after
    the steps, the gradient is the product's. It is the Triton kernel itself where a `LogitScaling`
    describes the steps.
    """
    if not steps:
        return softmax_gradient
    if softmax_gradient is triton_softmax_gradient and (head := head_of(steps)) is not None:
        return partial(triton_softmax_gradient, head=head)

    def of_product(
        logits: Tensor, targets: Tensor, scale: float | None
    ) -> tuple[Tensor, Tensor | None]:
        made = [logits]
        for step in steps:
            made.append(step(made[-1]))
        # a copy where tanh is last: `softmax_gradient` overwrites the logits, and tanh's backward
        # needs them
        last = made[-1].clone() if steps[-1].function is _TANH else made[-1]
        losses, gradient = softmax_gradient(last, targets, scale)
        for step, result in zip(reversed(steps), reversed(made), strict=False):
            gradient = None if gradient is None else step.backward(gradient, result)
        return losses, gradient

    return of_product


class LazyGradient(LazyTensor):
    """The loss's gradient of scaled or capped logits, computed only when read. Autograd's backward
    of the steps makes it the lazy gradient of the product, for which the gradients of x and the
    weight are known; any other operation reads it.
    """

    steps: tuple[LogitStep, ...] = ()
    following: Callable[..., Any] | None = None

    @classmethod
    def of(
        cls, source: Origin, steps: tuple[LogitStep, ...], following: Callable[..., Any] | None
    ) -> LazyGradient:
        """Return the lazy gradient of logits after `steps`.

        Args:
            source: of its values.
            following: gradients that follow from the gradient of the product, see `Origin.onward`.
        """
        source.onward = None if steps else following
        found: Any = cls(source)
        found.steps, found.following = steps, following
        return found  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Stay lazy through the backward of the last step, and of a cast; read the values for any
        other operation.
        """
        gradient = args[0] if args else None
        if isinstance(gradient, LazyGradient) and gradient.steps and not gradient.source.changed:
            *steps, last = gradient.steps
            if last.is_undone_by(func, args):
                source = gradient.source

                def make() -> Tensor:
                    others = (x.source.read() if isinstance(x, LazyTensor) else x for x in args[1:])
                    return func(source.read(), *others)  # type: ignore[no-any-return]

                return cls.of(
                    Origin(source.shape, source.dtype, source.device, make),
                    tuple(steps),
                    gradient.following,
                )
        if isinstance(gradient, LazyGradient) and func is CAST and _casts(gradient, kwargs or {}):
            kwargs = {"dtype": kwargs["dtype"]}
        return super().__torch_dispatch__(func, types, args, kwargs)


def _casts(gradient: Tensor, keywords: dict[str, Any]) -> bool:
    """Whether a copy with these keywords is autograd's, of a gradient in another dtype: its layout
    and device are named, too.
    """
    own = {"layout": gradient.layout, "device": gradient.device}
    return "dtype" in keywords and own.items() <= keywords.items()
