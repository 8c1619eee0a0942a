"""Weights that are computed from another tensor for each product, forward and backward, and not
kept.

They are dequantised from 4 bits (QLoRA, arXiv:2305.14314), or have their rows scaled by DoRA's
magnitude (arXiv:2402.09353), or are rounded as autocast rounds. A cached copy would go stale after
a write that autograd does not see, such as `weight.data.copy_()`; those of `rounded_weights` are
refreshed for every row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hf_packfree.ops.fused.lora_products import cat, product_in
from hf_packfree.ops.rounded_weights import RoundedWeight, copy_of


@dataclass(frozen=True)
class ComputedWeight:
    """A linear layer's weight W that is computed from another tensor.

    Attributes:
        source: the tensor, which autograd saves in the weight's place.
        shape: of W, (F, D).
        dtype: of W.
        compute: returns W [F, D], given the source.
        gradient: maps dW, in fp32 (on GPUs never rounded before), to the source's gradient; None:
            frozen.
        copy: what `compute` reads, for a weight that is rounded once for all products.
    """

    source: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    compute: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor], Tensor] | None = None
    copy: RoundedWeight | None = None


Weight = Tensor | ComputedWeight


def materialize(weight: Weight) -> Tensor:
    """Return the weight [F, D]."""
    return weight if isinstance(weight, Tensor) else weight.compute(weight.source)


def rounded(weight: Tensor, dtype: torch.dtype) -> ComputedWeight:
    """Return a weight [F, D] that is rounded to `dtype` where a product reads it, or once for all
    products where copies are in use.
    """
    to, back = partial(torch.Tensor.to, dtype=dtype), partial(torch.Tensor.to, dtype=weight.dtype)
    copy = copy_of(weight, dtype)
    return ComputedWeight(weight, weight.shape, dtype, copy.read if copy else to, back, copy)


def scaled(weight: Weight, scale: Tensor, dtype: torch.dtype) -> ComputedWeight:
    """Return a frozen weight [F, D] whose rows are multiplied by a scale [F], which may have a
    gradient.

    The product is computed in the wider dtype of both and rounded to `dtype`; the scale's gradient
    is summed in fp32 at least.
    """
    wide = torch.promote_types(scale.dtype, torch.float32)

    def compute(scale: Tensor) -> Tensor:
        return (scale[:, None] * materialize(weight)).to(dtype)

    def gradient(d_weight: Tensor) -> Tensor:
        return (d_weight.to(wide) * materialize(weight)).sum(1).to(scale.dtype)

    return ComputedWeight(scale, weight.shape, dtype, compute, gradient)


class Weights:
    """Weights [F, D] of layers that read the same tensor, computed when they are read.

    Args:
        sources: for each layer the weight, or the tensor that it is computed from.
        computed: for each layer how its weight is computed, or None.
    """

    def __init__(
        self, sources: Sequence[Tensor], computed: Sequence[ComputedWeight | None]
    ) -> None:
        self._sources, self._computed = sources, computed

    def __getitem__(self, layer: int) -> Tensor:
        source, how = self._sources[layer], self._computed[layer]
        return source if how is None else how.compute(source)

    def of(self, layers: slice) -> list[Tensor]:
        """Return the weights of several layers, all materialised."""
        pairs = zip(self._sources[layers], self._computed[layers])
        return [source if how is None else how.compute(source) for source, how in pairs]

    @property
    def in_features(self) -> int:
        """D."""
        source, how = self._sources[0], self._computed[0]
        return source.shape[1] if how is None else how.shape[1]

    def beside(self, layer: int, B: Sequence[Tensor]) -> Tensor:
        """Return [W, B], [F, D + K], of one layer, given B [F, K] in parts side by side."""
        how = self._computed[layer]
        found = how.copy.beside(cat(B, 1)) if how is not None and how.copy is not None else None
        return cat([self[layer], *B], 1) if found is None else found

    def above(self, layers: slice, A: Tensor) -> Tensor:
        """Return the weights of several layers, and A [K, D], one below the other."""
        computed = self._computed[layers]
        how = computed[0] if len(computed) == 1 else None
        found = how.copy.above(A) if how is not None and how.copy is not None else None
        return cat([*self.of(layers), A], 0) if found is None else found

    def gradients(
        self, layers: slice, out_features: Sequence[int], d_out: Tensor, x: Tensor
    ) -> list[Tensor]:
        """Return the gradients of the sources of some layers, given their input x [T, D] and the
        gradient d_out [T, all F] of their outputs side by side.
        """
        computed = self._computed[layers]
        wide = any(how is not None and how.gradient for how in computed)
        d_weights = product_in(d_out.t(), x, torch.float32 if wide else x.dtype)
        parts = [d_weights]
        if len(computed) > 1:
            parts = list(torch.split_with_sizes(d_weights, out_features))
        return [
            d if how is None or how.gradient is None else how.gradient(d)
            for how, d in zip(computed, parts, strict=True)
        ]
