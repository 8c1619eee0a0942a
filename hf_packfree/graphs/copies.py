"""The rounded copies of a text model's fp32 weights, which its graphs and its rows without a graph
share.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from hf_packfree.graphs.settings import Places, read_places
from hf_packfree.ops.rounded_weights import RoundedWeights

SPARE = 1 / 4
"""The share of the GPU's memory that copies leave, to activations and graphs among others."""
PATIENCE = 16
"""After so many rows without an optimizer's step copies are made all the same."""
AGAIN = 64
"""Every this many-th row the modules are walked for others that hold weights: PEFT makes
thousands, and walking them takes the host as long as a layer.
"""


class Copies:
    """The copies of one text model's weights, which are made anew where a weight moved, or is
    trained and was not.

    Args:
        trunk: the text model.

    Attributes:
        rounded: the copies at present.
    """

    def __init__(self, trunk: nn.Module) -> None:
        self._trunk = weakref.ref(trunk)
        self._places: Places = []
        self._rows = 0
        self._made_of: list[Tensor] = []
        self._facts: list[Any] = []
        self._first_step: FirstStep | None = None
        self._waited = 0
        self.rounded = RoundedWeights()

    def current(self, keep: bool = False) -> RoundedWeights | None:
        """Return the copies of the weights that the text model has now; None if others would have
        to be made, but those that there are must be kept.
        """
        weights = [x for x in self._weights() if _is_whole(x)]
        facts = [(x.data_ptr(), x.requires_grad, x.shape, x.dtype) for x in weights]
        # addresses first: they differ, if there are more weights
        if facts == self._facts and all(map(is_, weights, self._made_of)):
            return self.rounded
        if keep:
            return None
        self._made_of, self._facts = weights, facts
        return self.begin(refused=False)

    def of_new_settings(self) -> None:
        """Walk the modules, because some changed."""
        self._rows = 0
        self.current()

    def _weights(self) -> list[Tensor]:
        """Return the weights at present; those of modules that are new, up to `AGAIN` rows later,
        and until then they are rounded where products read them.
        """
        if self._rows % AGAIN == 0:
            trunk = self._trunk()
            assert trunk is not None
            self._places = read_places(trunk)
        self._rows += 1
        found = (own.get(name) for own, name in self._places)
        return [weight for weight in found if weight is not None]

    def begin(self, refused: bool) -> RoundedWeights:
        """Free the copies, but for graphs and rows whose backward pass is still to come.

        Args:
            refused: whether there is no memory for others of these weights.
        """
        self.rounded.leave()
        self.rounded = RoundedWeights(
            x for x in self._made_of if x.device == self._made_of[0].device
        )
        self.rounded.refused = refused
        return self.rounded

    def allocate(self) -> None:
        """Make copies of what was read so far, if they leave enough memory."""
        self.rounded.allocate(SPARE)

    def _has_stepped(self) -> bool:
        """Whether an optimizer has its states, or a loop has none that is torch's: copies leave
        memory to them, too.
        """
        self._waited += 1
        if self._first_step is None:
            self._first_step = FirstStep(x for x in self._made_of if x.requires_grad)
        return self._first_step.made or self._waited > PATIENCE

    def in_row(self, wait: bool, keep: bool) -> AbstractContextManager[None] | None:
        """Let products read the copies within the block, which runs a training row without a graph,
        and in its recomputation; None if they must not.

        The first row only notes which weights are read; the first after an optimizer's step has
        copies.

        Args:
            wait: whether no memory is taken yet, see `Graphs`.
            keep: whether graphs read the copies that there are.
        """
        rounded = self.current(keep)
        if rounded is None:
            return None
        try:
            if not wait and self._has_stepped():
                self.allocate()
            rounded.refresh()
        # copies are worth no row
        except torch.OutOfMemoryError:
            rounded = self.begin(refused=True)
        return rounded.in_row()


class FirstStep:
    """Notes whether an optimizer has made a step with one of some weights, since this was made.

    Versions of weights do not tell: torch counts none for what fused optimizers write.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = [weakref.ref(x) for x in weights]
        self.made = not self._weights
        if not self.made:
            _note_steps()
            _waiting.add(self)

    def after(self, held: set[int]) -> None:
        """Take note of a step with the weights of these `id`s."""
        if any(id(x()) in held for x in self._weights):
            self.made = True
            _waiting.discard(self)


_waiting: weakref.WeakSet[FirstStep] = weakref.WeakSet()


@functools.cache
def _note_steps() -> None:
    """Hook all optimizers, once: a hook that is removed when a model dies may be removed while
    torch calls hooks, which raises.
    """
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if notes := list(_waiting):
        held = {id(x) for group in optimizer.param_groups for x in group["params"]}
        for note in notes:
            note.after(held)


def _is_whole(x: Tensor) -> bool:
    """Whether a weight is an ordinary parameter, which nobody gathers from parts."""
    return type(x) is nn.Parameter and not hasattr(x, "ds_shape")
