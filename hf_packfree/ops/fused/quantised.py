"""Frozen weights that are kept in fewer bits: made whole where a product reads them, forward and backward, and never kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Restore = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Quantised:
    """A linear layer's frozen weight.

    Attributes:
        bits: what is kept.
        size: (F, D).
        dtype: of the weight.
        restore: returns the weight [F, D] of what is kept.
    """

    bits: Tensor
    size: tuple[int, int]
    dtype: torch.dtype
    restore: Restore


class Weights:
    """Weights [F, D] of several layers, made whole one after another as they are read.

    Attributes:
        heights: F of each.
    """

    def __init__(self, kept: Sequence[Tensor], restore: Sequence[Restore | None], heights: Sequence[int]) -> None:
        self._kept, self._restore, self.heights = kept, restore, heights

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, i: int) -> Tensor:
        restore = self._restore[i]
        return self._kept[i] if restore is None else restore(self._kept[i])

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.__getitem__, range(len(self)))

    def height(self, group: slice) -> int:
        """Return the outputs of several."""
        return sum(self.heights[group])

    def of(self, group: slice) -> list[Tensor]:
        """Return several, all of them whole."""
        return [self[i] for i in range(len(self))[group]]


def whole(weight: Tensor | Quantised) -> Tensor:
    """Return the weight [F, D]."""
    return weight if isinstance(weight, Tensor) else weight.restore(weight.bits)


__all__ = ["Quantised", "Restore", "Weights", "whole"]
