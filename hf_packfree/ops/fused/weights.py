"""Weights that something else is kept of: made where a product reads them, forward and backward,
and never kept.

In fewer bits (Dettmers et al., arXiv:2305.14314), with rows multiplied by a trained scale (Liu et
al., arXiv:2402.09353), or in a wider dtype than their products have. A rounded copy that stayed
would be stale after a write that hides from autograd, as `weight.data.copy_()` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hf_packfree.ops.fused.mixed import product_in


@dataclass(frozen=True)
class Made:
    """A linear layer's weight that is made of something else.

    Attributes:
        kept: what is kept of it.
        size: (F, D).
        dtype: of the weight.
        restore: returns the weight [F, D] of what is kept.
        gradient: returns the gradient of what is kept, of that of the weight, which comes in fp32
            where a GPU makes it so; None: it has none.
    """

    kept: Tensor
    size: tuple[int, int]
    dtype: torch.dtype
    restore: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor], Tensor] | None = None


Weight = Tensor | Made


def whole(weight: Weight) -> Tensor:
    """Return the weight [F, D]."""
    return weight if isinstance(weight, Tensor) else weight.restore(weight.kept)


def rounded(weight: Tensor, dtype: torch.dtype) -> Made:
    """Return a weight [F, D] that is rounded to `dtype` where a product reads it."""
    size = (weight.shape[0], weight.shape[1])
    return Made(weight, size, dtype, partial(_to, dtype=dtype), partial(_to, dtype=weight.dtype))


def _to(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def scaled(weight: Weight, scale: Tensor, dtype: torch.dtype) -> Made:
    """Return a frozen weight [F, D] whose rows are multiplied by a scale [F], which may have a
    gradient.

    The product is computed in the wider dtype of both and rounded to `dtype`; the scale's gradient
    is summed in fp32 at least.
    """
    wide = torch.promote_types(scale.dtype, torch.float32)

    def restore(scale: Tensor) -> Tensor:
        return (scale[:, None] * whole(weight)).to(dtype)

    def gradient(d_weight: Tensor) -> Tensor:
        return (d_weight.to(wide) * whole(weight)).sum(1).to(scale.dtype)

    size = (weight.shape[0], weight.shape[1]) if isinstance(weight, Tensor) else weight.size
    return Made(scale, size, dtype, restore, gradient)


class Weights:
    """Weights [F, D] of several layers, made whole one after another as they are read.

    Attributes:
        heights: F of each.
    """

    def __init__(
        self, kept: Sequence[Tensor], made: Sequence[Made | None], heights: tuple[int, ...]
    ) -> None:
        self._kept, self._made, self.heights = kept, made, heights

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, i: int) -> Tensor:
        made = self._made[i]
        return self._kept[i] if made is None else made.restore(self._kept[i])

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.__getitem__, range(len(self)))

    def of(self, group: slice) -> list[Tensor]:
        """Return several, all of them whole."""
        return [self[i] for i in range(len(self))[group]]

    def gradients(self, group: slice, d_out: Tensor, x: Tensor) -> list[Tensor]:
        """Return the gradients of what is kept of several, given that of their outputs side by
        side, [T, all F], and x [T, D].
        """
        made = self._made[group]
        wide = any(one is not None and one.gradient for one in made)
        d_weights = product_in(d_out.t(), x, torch.float32 if wide else x.dtype)
        parts = (
            [d_weights]
            if len(made) == 1
            else torch.split_with_sizes(d_weights, self.heights[group])
        )
        return [
            d if one is None or one.gradient is None else one.gradient(d)
            for one, d in zip(made, parts, strict=True)
        ]


__all__ = ["Made", "Weight", "Weights", "rounded", "scaled", "whole"]
