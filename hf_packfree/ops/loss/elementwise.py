"""What heads do with the product of their last layer, element by element: a scale (Granite, Cohere,
Falcon-H1), a cap (Gemma).

The chunks of the loss do the same, so that nobody has to read such logits, either.
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
from hf_packfree.ops.loss.softmax import Head, SoftmaxGradient, triton_softmax_gradient
from hf_packfree.packing.lazy import LazyTensor, Source

_TANH = torch.ops.aten.tanh.default
_TANH_BACKWARD = torch.ops.aten.tanh_backward.default
_BY_A_NUMBER = torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor


@dataclass(frozen=True)
class Step:
    """One operation on every logit.

    Attributes:
        function: torch's product with, or quotient by, a number, or its tanh.
        numbers: that number, of which tanh has none.
    """

    function: Any
    numbers: tuple[float, ...]

    def __call__(self, logits: Tensor) -> Tensor:
        """Return a new tensor."""
        found: Tensor = self.function(logits, *self.numbers)
        return found

    def backward(self, gradient: Tensor, result: Tensor) -> Tensor:
        """Return the gradient of what `result` was made of."""
        if self.function is _TANH:
            return _TANH_BACKWARD(gradient, result)  # type: ignore[no-any-return]
        return self(gradient)

    @property
    def factor(self) -> float:
        """What logits are multiplied by; 1 for tanh."""
        if self.function is _TANH:
            return 1.0
        (number,) = self.numbers
        if self.function is torch.ops.aten.mul.Tensor:
            # Triton would compile a kernel once more for integers
            return float(number)
        return 1 / number if number else float("inf")

    @property
    def slope(self) -> float:
        """How many times as large a gradient may become in `backward`, at most 2**30."""
        return min(abs(self.factor), 2.0**30)

    def is_undone_by(self, func: Any, args: Any) -> bool:
        """Whether autograd calls this for that gradient."""
        wanted = _TANH_BACKWARD if self.function is _TANH else self.function
        return func is wanted and (self.function is _TANH or args[1:] == self.numbers)


def step_of(func: Any, args: Any) -> Step | None:
    """Return what an operation does with every element of its first argument; None for others."""
    numbers = args[1:]
    of_numbers = func in _BY_A_NUMBER and all(isinstance(one, int | float) for one in numbers)
    return Step(func, numbers) if of_numbers or func is _TANH else None


@dataclass(frozen=True, eq=False)
class Elementwise:
    """Makes logits of those before a step.

    Attributes:
        before: where these come from.
        step: what is done with them.
    """

    before: Source
    step: Step

    def __call__(self) -> Tensor:
        """Return the step's logits; those that it reads are made for that and not kept."""
        if self.before.changed:
            raise UnsupportedInput(
                "found logits changed in place before what a head makes of them was read; wanted "
                "them unchanged; read the model's own logits first, or patch with "
                "backend={'loss': 'upstream'}"
            )
        made = self.before.make() if self.before.values is None else self.before.values
        return self.step(made)


def origin_of(source: Source) -> tuple[Source, tuple[Step, ...]]:
    """Return where the product comes from, and the steps from there."""
    steps: tuple[Step, ...] = ()
    while isinstance(made := source.make, Elementwise):
        source, steps = made.before, (made.step, *steps)
    return source, steps


def growth(steps: tuple[Step, ...]) -> float:
    """Return how many times as large a gradient may become on its way back through steps."""
    return max(accumulate((step.slope for step in reversed(steps)), mul, initial=1.0))


_FACTOR_TANH_FACTOR = (
    (False,),
    (True,),
    (False, True),
    (True, False),
    (False, True, False),
)
"""The orders that are a `Head`: whether each step is a tanh."""


def head_of(steps: tuple[Step, ...]) -> Head | None:
    """Return what these steps are together: a factor, a tanh and a factor, or some of the three;
    None where they are something else.
    """
    tanhs = tuple(step.function is _TANH for step in steps)
    if tanhs not in _FACTOR_TANH_FACTOR:
        return None
    return Head(steps[0].factor, any(tanhs), steps[-1].factor if any(tanhs) else 1.0)


def after_steps(softmax_gradient: SoftmaxGradient, steps: tuple[Step, ...]) -> SoftmaxGradient:
    """Return what gives the losses of what these steps make of a product, and the gradient of that
    product: the Triton kernel itself where it can.
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
        # which is overwritten where tanh's own result is wanted afterwards
        last = made[-1].clone() if steps[-1].function is _TANH else made[-1]
        losses, gradient = softmax_gradient(last, targets, scale)
        for step, result in zip(reversed(steps), reversed(made), strict=False):
            gradient = None if gradient is None else step.backward(gradient, result)
        return losses, gradient

    return of_product


class LazyGradient(LazyTensor):
    """A gradient of logits that is not made where what follows from it is known: through the steps
    between product and loss, in their order, and nothing else.
    """

    steps: tuple[Step, ...] = ()
    following: Callable[..., Any] | None = None

    @classmethod
    def of(
        cls, source: Source, steps: tuple[Step, ...], following: Callable[..., Any] | None
    ) -> LazyGradient:
        """Return the gradient of what `steps` lead to.

        Args:
            source: of its values.
            following: what follows from the gradient of the product, see `Source.onward`.
        """
        source.onward = None if steps else following
        found: Any = cls(source)
        found.steps, found.following = steps, following
        return found  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Wait on at what autograd does on its way back to the product."""
        gradient = args[0] if args else None
        if isinstance(gradient, LazyGradient) and gradient.steps and not gradient.source.changed:
            *steps, last = gradient.steps
            if last.is_undone_by(func, args):
                source = gradient.source

                def make() -> Tensor:
                    others = (x.source.read() if isinstance(x, LazyTensor) else x for x in args[1:])
                    return func(source.read(), *others)  # type: ignore[no-any-return]

                return cls.of(
                    Source(source.shape, source.dtype, source.device, make),
                    tuple(steps),
                    gradient.following,
                )
        return super().__torch_dispatch__(func, types, args, kwargs)


__all__ = [
    "Elementwise",
    "LazyGradient",
    "Step",
    "after_steps",
    "growth",
    "head_of",
    "origin_of",
    "step_of",
]
