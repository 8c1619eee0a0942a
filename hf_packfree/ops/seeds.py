"""Seeds of dropout masks, which are drawn again for the backward pass instead of being kept.

A CUDA graph cannot draw a seed anew when layers are recomputed, and torch's generators cannot be
read in a capture. So all masks of a row that graphs replay have one seed, which is drawn before the
replay, and a number of their own; a second run of a layer takes the first one's numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from hf_packfree.ops.in_use import listed

# neither 1 nor a multiple of 16, for which Triton would compile a kernel of their own
_FIRST = 3
_STEP = 2


class Seed(NamedTuple):
    """What a mask is drawn from: its row's seed, int64 [1] on the device, and a number."""

    of_row: Tensor
    number: int


class Seeds:
    """The seeds of the masks in the rows that a model's graphs replay."""

    def __init__(self) -> None:
        self._of_row: Tensor | None = None
        self._next = _FIRST

    def in_use(self) -> AbstractContextManager[None]:
        """Let `draw_seed` take from these in the block."""
        return listed(self, _in_use)

    def take(self, device: torch.device) -> Seed:
        """Return the next seed."""
        if self._of_row is None:
            self._of_row = torch.zeros(1, dtype=torch.int64, device=device)
        number, self._next = self._next, self._next + _STEP
        return Seed(self._of_row, number)

    def refresh(self) -> None:
        """Draw the next row's seed from torch's generator, if any mask has one."""
        if self._of_row is not None:
            self._of_row.random_()

    def of_both_runs(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of a recomputed layer's two runs, for the first of which this is
        called: `context_fn` of `torch.utils.checkpoint.checkpoint`.
        """
        return nullcontext(), self._again(self._next)

    @contextmanager
    def _again(self, first: int) -> Iterator[None]:
        following, self._next = self._next, first
        try:
            yield
        finally:
            self._next = following


_in_use: list[Seeds] = []


def draw_seed(device: torch.device) -> Seed:
    """Return the seed of a mask on a device: of a capture's `Seeds`, whichever thread asks, or else
    from torch's generator of the device, whose state gradient checkpointing restores.
    """
    if _in_use:
        return _in_use[-1].take(device)
    return Seed(torch.empty(1, dtype=torch.int64, device=device).random_(), _FIRST)
