"""Linear layers that read one tensor, some of them with low-rank adapters (Hu et al.,
arXiv:2106.09685).

A layer's output is x W' + sum over its adapters of scale * dropout(x) A' B'. All A of layers that
read x without dropout are one product; with what they give beside x, and B beside W, the output is
one product too, whose sum is rounded once. The backward pass gives no gradient to frozen weights;
it keeps x, which the layer keeps anyway, and x A' of rank r. Dropout's masks are drawn again from
their seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.nn.functional import dropout, linear

from hf_packfree.ops.fused.mixed import Plain, cat, outer_gradients, products_of
from hf_packfree.ops.fused.weights import Made, Weight, whole

# elements; what kernels know to divide the distance of rows, they load and store in vectors
_ALIGNED = 16


@dataclass(frozen=True)
class Adapter:
    """What is added to a linear layer from D to F.

    Attributes:
        down: A, [r, D].
        up: B, [F, r], in the dtype of `down`.
        scale: what the product is multiplied by.
        dropout: the probability that an element of x is zero for this adapter, below 1.
        dtype: of its products, to which A and B are rounded: that of the layer's, or fp32 where
            these are of half precision; None: as A and B are.
    """

    down: Tensor
    up: Tensor
    scale: float
    dropout: float = 0.0
    dtype: torch.dtype | None = None

    @property
    def computed_in(self) -> torch.dtype:
        """The dtype of its products."""
        return self.dtype or self.down.dtype


@dataclass(frozen=True)
class Adapted:
    """A linear layer's weight [F, D] with its adapters."""

    weight: Weight
    adapters: tuple[Adapter, ...]


Layer = Weight | Adapted
"""A linear layer without bias: its weight [F, D], or that with adapters."""


def weight_of(layer: Layer) -> Weight:
    """Return the layer's weight without adapters."""
    return layer.weight if isinstance(layer, Adapted) else layer


def as_read(x: Tensor, layer: Layer) -> Tensor:
    """Return x rounded to the dtype of the layer's products, if it has another."""
    return x.to(weight_of(layer).dtype)


def layer_reference(x: Tensor, layer: Layer) -> Tensor:
    """Return the layer's output in PyTorch: products of adapters in their own dtype, rounded to
    x's once they are added.
    """
    out = linear(x, whole(weight_of(layer)))
    if not isinstance(layer, Adapted):
        return out
    for adapter in layer.adapters:
        dtype = adapter.computed_in
        read = dropout(x.to(dtype), adapter.dropout)
        inner = linear(read, adapter.down.to(dtype))
        out = out + linear(inner, adapter.up.to(dtype)) * adapter.scale
    return out.to(x.dtype)


@dataclass(frozen=True)
class Reading:
    """Adapters of one kind that read the same x: all that drop nothing out, or one with a mask of
    its own.

    Attributes:
        adapters: their numbers.
        dtype: of the products.
        rank: of A and B.
        scale: what the products are multiplied by, that of dropout included.
        seed: of the mask, or None.
        dropout: the probability.
    """

    adapters: tuple[int, ...]
    dtype: torch.dtype
    rank: int
    scale: float
    seed: int | None = None
    dropout: float = 0.0

    def of(self, x: Tensor) -> Tensor:
        """Return x, or x with zeros where it is dropped out: what is left is scaled in the
        products, in fp32.
        """
        if self.seed is None:
            return x
        generator = torch.Generator(x.device).manual_seed(self.seed)
        keep = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        return x * keep.bernoulli_(1 - self.dropout, generator=generator)


Kind = tuple[torch.dtype, int, float]
"""Of a reading: dtype, rank, scale."""


@dataclass(frozen=True)
class Layout:
    """What is known of layers beside their tensors.

    Attributes:
        heights: of each, how many outputs it has.
        made: of what a weight is made, where that is not the weight itself.
        owners: by adapter, the number of its layer.
        readings: which adapters read what.
    """

    heights: tuple[int, ...]
    made: tuple[Made | None, ...]
    owners: tuple[int, ...] = ()
    readings: tuple[Reading, ...] = ()

    @cached_property
    def layers(self) -> int:
        """How many there are."""
        return len(self.heights)

    def columns(self, x: Tensor) -> int:
        """Return the columns that `spare_columns` finds for these adapters."""
        return spare_columns(
            x, [(reading.dtype, reading.rank * len(reading.adapters)) for reading in self.readings]
        )

    @cached_property
    def tensors(self) -> int:
        """How many tensors `take_apart` returns."""
        return self.layers + 2 * len(self.owners)


def take_apart(layers: Sequence[Layer]) -> tuple[Layout, tuple[Tensor, ...]]:
    """Return the layout and the tensors, for an autograd function: weights, then A and B of
    every adapter.
    """
    kept, heights, made = _kept(layers)
    if not any(isinstance(layer, Adapted) for layer in layers):
        return (Layout(heights, made) if any(made) else _of_weights(heights)), kept
    owned = [
        (i, adapter)
        for i, layer in enumerate(layers)
        if isinstance(layer, Adapted)
        for adapter in layer.adapters
    ]
    adapters = [adapter for _, adapter in owned]
    layout = Layout(heights, made, tuple(i for i, _ in owned), tuple(_readings(adapters)))
    return layout, (
        *kept,
        *(tensor for adapter in adapters for tensor in (adapter.down, adapter.up)),
    )


@cache
def _of_weights(heights: tuple[int, ...]) -> Layout:
    """The layout of plain weights, which is that of every layer of a kind."""
    return Layout(heights, (None,) * len(heights))


def _kept(
    layers: Sequence[Layer],
) -> tuple[tuple[Tensor, ...], tuple[int, ...], tuple[Made | None, ...]]:
    """Return what is kept of the weights, their heights, and how they are made of it."""
    found = [
        (w, w.shape[0], None) if isinstance(w, Tensor) else (w.kept, w.size[0], w)
        for w in map(weight_of, layers)
    ]
    kept, heights, made = zip(*found, strict=True) if found else ((), (), ())
    return kept, heights, made


def _readings(adapters: Sequence[Adapter]) -> Iterator[Reading]:
    """Yield what is read together: the same products, and no masks."""
    together: dict[Kind, list[int]] = {}
    for i, adapter in enumerate(adapters):
        rank, scale = adapter.down.shape[0], adapter.scale / (1 - adapter.dropout)
        kind = adapter.computed_in, rank, scale
        if adapter.dropout:
            yield Reading((i,), *kind, _seed(), adapter.dropout)
        else:
            together.setdefault(kind, []).append(i)
    yield from (_reading(tuple(numbers), kind) for kind, numbers in together.items())


@cache
def _reading(adapters: tuple[int, ...], kind: Kind) -> Reading:
    """One without dropout, which is that of every layer of a kind."""
    return Reading(adapters, *kind)


def _seed() -> int:
    """Draw one from torch's generator, whose state gradient checkpointing restores."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


def spare_columns(x: Tensor, adapters: Iterable[tuple[torch.dtype, int]]) -> int:
    """Return how many columns what is inner of adapters, by dtype and rank, takes beside x, in rows
    of whole vectors.

    0: x is not multiplied beside it, because it is in another dtype.
    """
    columns = 0
    for dtype, rank in adapters:
        products = products_of(x, dtype)
        if isinstance(products, Plain) and dtype != x.dtype:
            return 0
        columns += products.parts * rank
    row = x.shape[-1] + columns
    return columns + -row % _ALIGNED if columns else 0


class LowRank:
    """The adapters of layers that read one tensor, inside an autograd function."""

    def __init__(self, layout: Layout, tensors: Sequence[Tensor]) -> None:
        self.layout = layout
        self.downs, self.ups = tensors[layout.layers :: 2], tensors[layout.layers + 1 :: 2]

    def inner(self, x: Tensor) -> list[Tensor]:
        """Return scale * dropout(x) A' of each reading, of x [T, D], as `products_of` has it."""
        return [
            products_of(x, reading.dtype).inner(reading.of(x), self._downs(reading), reading.scale)
            for reading in self.layout.readings
        ]

    def outer_factor(self, layer: int, like: Tensor) -> Tensor | None:
        """Return w [F, K]: the layer's adapters add h w', with h the first K columns of all that
        is inner; None: nothing.
        """
        found: list[Tensor] = []
        # columns of other layers' adapters since the last of this one's
        before = 0
        for reading in self.layout.readings:
            products = products_of(like, reading.dtype)
            for i in reading.adapters:
                if self.layout.owners[i] == layer:
                    factor = products.up_factor(self.ups[i], like)
                    found += [factor.new_zeros(factor.shape[0], before)] * (before > 0) + [factor]
                    before = 0
                else:
                    before += products.parts * reading.rank
        return cat(found, 1) if found else None

    def outer_gradients(
        self, d_outs: Sequence[Tensor], inner: Sequence[Tensor], needed: Sequence[bool]
    ) -> tuple[list[Tensor], dict[int, Tensor | None]]:
        """Return the gradients of dropout(x) A' of each reading, of d_outs [T, F] of every layer,
        and those of B by adapter.

        Args:
            inner: what `inner` returned.
            needed: whether the gradients of A and B of every adapter are.
        """
        d_inner: list[Tensor] = []
        d_ups: dict[int, Tensor | None] = {}
        for reading, joint in zip(self.layout.readings, inner, strict=True):
            numbers = reading.adapters
            mine, ups = (
                [d_outs[self.layout.owners[i]] for i in numbers],
                [self.ups[i] for i in numbers],
            )
            products, h = products_of(mine[0], reading.dtype), joint.chunk(len(numbers), 1)
            d_h, found = outer_gradients(
                products, mine, ups, h, reading.scale, [needed[2 * i + 1] for i in numbers]
            )
            d_inner.append(d_h)
            d_ups |= zip(numbers, found, strict=True)
        return d_inner, d_ups

    def input_factor(self, like: Tensor) -> Tensor | None:
        """Return w [K, D]: what comes through the adapters to x's gradient is d_h w, with d_h [T,
        K] all inner gradients.

        None if anything is dropped out, or a product is not in the dtype of `like`.
        """
        readings = self.layout.readings
        if any(reading.dropout for reading in readings):
            return None
        factors = [
            products_of(like, one.dtype).down_factor(self._downs(one), like) for one in readings
        ]
        return cat(factors, 0) if all(factor.dtype == like.dtype for factor in factors) else None

    def input_gradient(self, d_inner: Sequence[Tensor], like: Tensor) -> Tensor:
        """Return the part of x's gradient that comes through the adapters, [T, D] in the dtype
        of `like`.
        """
        total: Tensor | None = None
        for reading, d_h in zip(self.layout.readings, d_inner, strict=True):
            d_x = reading.of(
                (d_h @ products_of(like, reading.dtype).down_factor(self._downs(reading), like)).to(
                    like.dtype
                )
            )
            total = d_x if total is None else total.add_(d_x)
        assert total is not None
        return total

    def down_gradients(
        self, x: Tensor, d_inner: Sequence[Tensor], needed: Sequence[bool]
    ) -> dict[int, Tensor]:
        """Return the gradients of A by adapter, where `needed` says so of any that reads the
        same.
        """
        found: dict[int, Tensor] = {}
        for reading, d_h in zip(self.layout.readings, d_inner, strict=True):
            products, numbers = products_of(x, reading.dtype), reading.adapters
            if any(needed[2 * i] for i in numbers):
                d_downs = products.down_gradients(reading.of(x), d_h, self._downs(reading))
                found |= zip(numbers, d_downs, strict=True)
        return found

    def _downs(self, reading: Reading) -> list[Tensor]:
        return [self.downs[i] for i in reading.adapters]


__all__ = [
    "Adapted",
    "Adapter",
    "Layer",
    "Layout",
    "LowRank",
    "Reading",
    "as_read",
    "layer_reference",
    "spare_columns",
    "take_apart",
    "weight_of",
]
