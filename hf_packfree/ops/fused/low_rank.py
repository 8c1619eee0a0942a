"""Linear layers that read one tensor, some of them with low-rank adapters (Hu et al., arXiv:2106.09685).

A layer's output is x W' + sum over its adapters of scale * dropout(x) A' B'.  All A of layers that read x without dropout are
one product, and each B' is written where the product with W' is added in the matrix library's own sum, so that no output is
read again for an adapter.  The backward pass gives no gradient to frozen weights; it keeps x, which the layer keeps anyway,
and x A' of rank r.  Dropout's masks are drawn again from their seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import dropout, linear

from hf_packfree.ops.fused.mixed import rounded_product, times


@dataclass(frozen=True)
class Adapter:
    """What is added to a linear layer from D to F.

    Attributes:
        down: A, [r, D].
        up: B, [F, r], in the dtype of `down`: that of x, or fp32 where x is of half precision.
        scale: what the product is multiplied by.
        dropout: the probability that an element of x is zero for this adapter, below 1.
    """

    down: Tensor
    up: Tensor
    scale: float
    dropout: float = 0.0


@dataclass(frozen=True)
class Adapted:
    """A linear layer's weight [F, D] with its adapters."""

    weight: Tensor
    adapters: tuple[Adapter, ...]


Layer = Tensor | Adapted
"""A linear layer without bias: its weight [F, D], or that with adapters."""


def weight_of(layer: Layer) -> Tensor:
    """Return the layer's weight without adapters."""
    return layer if isinstance(layer, Tensor) else layer.weight


def layer_reference(x: Tensor, layer: Layer) -> Tensor:
    """Return the layer's output in PyTorch: products of adapters in their own dtype, rounded to x's once they are added."""
    if isinstance(layer, Tensor):
        return linear(x, layer)
    out = linear(x, layer.weight)
    for adapter in layer.adapters:
        read = dropout(x.to(adapter.down.dtype), adapter.dropout)
        out = out + linear(linear(read, adapter.down), adapter.up) * adapter.scale
    return out.to(x.dtype)


@dataclass(frozen=True)
class Reading:
    """Adapters of one dtype that read the same x: all that drop nothing out, or one with a mask of its own.

    Attributes:
        adapters: their numbers.
        seed: of the mask, or None.
        dropout: the probability.
    """

    adapters: tuple[int, ...]
    seed: int | None = None
    dropout: float = 0.0

    def of(self, x: Tensor) -> Tensor:
        """Return x, or x with zeros where it is dropped out: what is left is scaled in the products, in fp32."""
        if self.seed is None:
            return x
        generator = torch.Generator(x.device).manual_seed(self.seed)
        keep = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        return x * keep.bernoulli_(1 - self.dropout, generator=generator)


@dataclass(frozen=True)
class Layout:
    """What is known of layers beside their tensors.

    Attributes:
        layers: how many.
        owners: by adapter, the number of its layer.
        scales: by adapter, with what dropout multiplies.
        readings: which adapters read what.
    """

    layers: int
    owners: tuple[int, ...] = ()
    scales: tuple[float, ...] = ()
    readings: tuple[Reading, ...] = ()

    @property
    def tensors(self) -> int:
        """How many tensors `take_apart` returns."""
        return self.layers + 2 * len(self.owners)


def take_apart(layers: Sequence[Layer]) -> tuple[Layout, tuple[Tensor, ...]]:
    """Return the layout and the tensors, for an autograd function: weights, then A and B of every adapter."""
    weights = [weight_of(layer) for layer in layers]
    if all(isinstance(layer, Tensor) for layer in layers):
        return Layout(len(layers)), tuple(weights)
    owned = [(i, adapter) for i, layer in enumerate(layers) if isinstance(layer, Adapted) for adapter in layer.adapters]
    adapters = [adapter for _, adapter in owned]
    whole = {i: adapter.down.dtype for i, adapter in enumerate(adapters) if not adapter.dropout}
    readings = [Reading(tuple(i for i in whole if whole[i] == dtype)) for dtype in dict.fromkeys(whole.values())]
    readings += [Reading((i,), _seed(), adapter.dropout) for i, adapter in enumerate(adapters) if adapter.dropout]
    layout = Layout(
        len(layers), tuple(i for i, _ in owned), tuple(a.scale / (1 - a.dropout) for a in adapters), tuple(readings)
    )
    return layout, (*weights, *(tensor for adapter in adapters for tensor in (adapter.down, adapter.up)))


def _seed() -> int:
    """Draw one from torch's generator, whose state gradient checkpointing restores."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


class LowRank:
    """The adapters of layers that read one tensor, inside an autograd function."""

    def __init__(self, layout: Layout, tensors: Sequence[Tensor]) -> None:
        self.layout = layout
        self.downs, self.ups = tensors[layout.layers :: 2], tensors[layout.layers + 1 :: 2]

    def inner(self, x: Tensor) -> list[Tensor]:
        """Return scale * dropout(x) A' of each reading, [T, its ranks], of x [T, D]."""
        found = []
        for reading in self.layout.readings:
            h = times(reading.of(x), torch.cat([self.downs[i] for i in reading.adapters]).T)
            found.append(self._scaled(reading, h))
        return found

    def outer(self, inner: Sequence[Tensor], layer: int, x: Tensor) -> Tensor | None:
        """Return what the layer's adapters add to its output, [T, F] in x's dtype, or None."""
        parts = [(h, self.ups[i]) for i, h in self._columns(inner) if self.layout.owners[i] == layer]
        if not parts:
            return None
        hs, ups = zip(*parts, strict=True)
        return rounded_product(_joint(hs), _joint(ups).T, x)

    def inner_gradients(self, d_outs: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of what `inner` returned before scaling, of d_outs [T, F] of every layer."""
        owners = self.layout.owners
        return [
            self._scaled(reading, _joint([times(d_outs[owners[i]], self.ups[i]) for i in reading.adapters]))
            for reading in self.layout.readings
        ]

    def input_gradient(self, d_inner: Sequence[Tensor], like: Tensor) -> Tensor:
        """Return the part of x's gradient that comes through the adapters, [T, D] in the dtype of `like`."""
        total: Tensor | None = None
        for reading, d_h in zip(self.layout.readings, d_inner, strict=True):
            d_x = reading.of(rounded_product(d_h, torch.cat([self.downs[i] for i in reading.adapters]), like))
            total = d_x if total is None else total.add_(d_x)
        assert total is not None
        return total

    def gradients(
        self, x: Tensor, inner: Sequence[Tensor], d_inner: Sequence[Tensor], d_outs: Sequence[Tensor], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return the gradients of A and B of every adapter, where `needed` says so."""
        found: dict[int, Tensor] = {}
        for reading, d_h in zip(self.layout.readings, d_inner, strict=True):
            if any(needed[2 * i] for i in reading.adapters):
                d_downs = times(reading.of(x).T, d_h).T.contiguous()
                parts = d_downs.split([len(self.downs[i]) for i in reading.adapters])
                found |= {2 * i: part for i, part in zip(reading.adapters, parts, strict=True)}
        for i, h in self._columns(inner):
            if needed[2 * i + 1]:
                found[2 * i + 1] = times(d_outs[self.layout.owners[i]].T, h)
        return [found.get(i) if needs else None for i, needs in enumerate(needed)]

    def _columns(self, joint: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield every adapter's number and columns of what each reading's adapters have side by side."""
        for reading, h in zip(self.layout.readings, joint, strict=True):
            yield from zip(reading.adapters, h.split([len(self.downs[i]) for i in reading.adapters], 1), strict=True)

    def _scaled(self, reading: Reading, h: Tensor) -> Tensor:
        """Multiply every adapter's columns by its scale, in place."""
        scales = [self.layout.scales[i] for i in reading.adapters]
        if len(set(scales)) == 1:
            return h.mul_(scales[0])
        for part, scale in zip(h.split([len(self.downs[i]) for i in reading.adapters], 1), scales, strict=True):
            part.mul_(scale)
        return h


def _joint(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), 1)


__all__ = ["Adapted", "Adapter", "Layer", "Layout", "LowRank", "Reading", "layer_reference", "take_apart", "weight_of"]
