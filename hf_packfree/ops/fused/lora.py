"""LoRA's adapters (Hu et al., arXiv:2106.09685) of linear layers that read the same tensor;
formulas in README.md.

The A of all adapters without dropout are one product. Frozen weights get no gradient; for the
backward pass x is kept, as without adapters, and h of rank r. Dropout masks are drawn again from
their seeds (`hf_packfree.ops.fused.dropped_products`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, linear

from hf_packfree.ops.fused.computed_weights import Weight, materialize
from hf_packfree.ops.fused.dropped_products import Mask, add, draws_within, left
from hf_packfree.ops.fused.lora_products import (
    Products,
    cat,
    on_tensor_cores,
    products_for,
)
from hf_packfree.ops.seeds import draw_seed

# elements; kernels use vector loads and stores where the stride of rows is a multiple of this
_ALIGNED = 16


@dataclass(frozen=True)
class Adapter:
    """An adapter of a linear layer from D to F, which adds scaling * dropout(x) A^T B^T.

    Attributes:
        A: [r, D].
        B: [F, r], in the dtype of A.
        scaling: PEFT's, alpha / r.
        dropout: the probability that an element of x is zero for this adapter, below 1.
        dtype: of the products with A and B: the weight's, or fp32 over a half-precision weight.
            Default: A's.
    """

    A: Tensor
    B: Tensor
    scaling: float
    dropout: float = 0.0
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class LoraLinear:
    """A linear layer's weight [F, D] with its adapters."""

    weight: Weight
    adapters: tuple[Adapter, ...]


Layer = Weight | LoraLinear
"""A linear layer without bias: its weight [F, D], or the weight with adapters."""


def weight_of(layer: Layer) -> Weight:
    """Return the layer's weight without adapters."""
    return layer.weight if isinstance(layer, LoraLinear) else layer


def cast_input(x: Tensor, layer: Layer) -> Tensor:
    """Return x in the dtype of the layer's weight."""
    return x.to(weight_of(layer).dtype)


def layer_reference(x: Tensor, layer: Layer) -> Tensor:
    """Return the layer's output [..., F] in PyTorch, in x's dtype: the adapters' products are in
    their own dtype, and the sum is rounded.
    """
    out = linear(x, materialize(weight_of(layer)))
    if not isinstance(layer, LoraLinear):
        return out
    for adapter in layer.adapters:
        dtype = adapter.dtype or adapter.A.dtype
        h = linear(dropout(x.to(dtype), adapter.dropout), adapter.A.to(dtype))
        out = out + linear(h, adapter.B.to(dtype)) * adapter.scaling
    return out.to(x.dtype)


@dataclass(frozen=True)
class AdapterGroup:
    """Adapters whose h is one product: adapters of one dtype, rank and scaling without dropout, or
    a single adapter with dropout.

    Attributes:
        adapters: the group's span in the list of all adapters.
        layers: the number of each adapter's layer.
        products: the products with the group's A and B.
        rank: of A and B.
        scaling: the adapters' scaling, divided by 1 - dropout.
        mask: the adapter's dropout; None without.
    """

    adapters: slice
    layers: tuple[int, ...]
    products: Products
    rank: int
    scaling: float
    mask: Mask | None = None


def group_adapters(
    owned: Sequence[tuple[int, Adapter]], dtype: torch.dtype
) -> tuple[list[AdapterGroup], list[Tensor]]:
    """Return groups of adapters, and A and B of each adapter in the groups' order.

    Args:
        dtype: of x.
    """
    members: dict[tuple[Any, ...], list[tuple[int, Adapter]]] = {}
    for i, (layer, one) in enumerate(owned):
        kind = one.dtype or one.A.dtype, one.A.shape[0], one.scaling
        # every adapter with dropout is a group of its own
        members.setdefault((*kind, i if one.dropout else None), []).append((layer, one))
    groups: list[AdapterGroup] = []
    tensors: list[Tensor] = []
    for (of_adapters, rank, scaling, _), each in members.items():
        span = slice(len(tensors) // 2, len(tensors) // 2 + len(each))
        layers = tuple([layer for layer, _ in each])
        products = products_for(dtype, of_adapters, on_tensor_cores(each[0][1].A))
        A, dropped, mask = each[0][1].A, each[0][1].dropout, None
        if dropped:
            within = draws_within(A, dtype, products.dtype, products.parts * rank)
            mask = Mask(draw_seed(A.device), dropped, within)
        scaling /= 1 - dropped
        groups.append(AdapterGroup(span, layers, products, rank, scaling, mask))
        tensors += [tensor for _, one in each for tensor in (one.A, one.B)]
    return groups, tensors


def spare_columns(
    x: Tensor, dtype: torch.dtype, products_and_ranks: Iterable[tuple[Products, int]]
) -> int:
    """Return how many spare columns after x [..., D] the adapters' h takes, rounded up so that rows
    are whole vectors.

    Returns 0 if any h is in another dtype than `dtype`, so that [x, h] cannot be the input of one
    product.

    Args:
        products_and_ranks: for each adapter or group its products and its rank.
    """
    columns = 0
    for products, rank in products_and_ranks:
        if products.dtype != dtype:
            return 0
        columns += products.parts * rank
    return columns + -(x.shape[-1] + columns) % _ALIGNED if columns else 0


class JoinedAdapters:
    """The adapters of layers that read the same tensor, inside an autograd function.

    Args:
        tensors: A and B of each.
    """

    def __init__(self, groups: Sequence[AdapterGroup], tensors: Sequence[Tensor]) -> None:
        self.groups, self.As, self.Bs = groups, tensors[::2], tensors[1::2]

    def h(self, x: Tensor) -> list[Tensor]:
        """Return scaling * dropout(x) A^T of each group [T, K], given x [T, D]."""
        return [
            group.products.h(x, self.As[group.adapters], group.scaling, group.mask)
            for group in self.groups
        ]

    @cached_property
    def _factors_B(self) -> list[Sequence[Tensor]]:
        return [group.products.factors_B(self.Bs[group.adapters]) for group in self.groups]

    def factor_B(self, layer: int) -> list[Tensor]:
        """Return B of the layer's adapters in parts that lie side by side, [F, K] together, with
        zeros where the joined h has other layers' columns; nothing if the layer has no adapter.

        The adapters add h B^T to the layer's output, with the first K columns of the joined h.
        """
        found: list[Tensor] = []
        # columns of other layers' h, for which B has zeros
        others = 0
        for group, Bs in zip(self.groups, self._factors_B, strict=True):
            for owner, B in zip(group.layers, Bs, strict=True):
                if owner == layer:
                    found += [B.new_zeros(B.shape[0], others), B] if others else [B]
                    others = 0
                else:
                    others += group.products.parts * group.rank
        return found

    def d_h_and_d_B(
        self, d_outs: Sequence[Tensor], h: Sequence[Tensor], needed: Sequence[bool]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the gradients of every group's h and of every B.

        Args:
            d_outs: [T, F] of every layer.
            h: of each group.
            needed: whether the gradient of each B is needed.
        """
        d_hs: list[Tensor] = []
        d_Bs: list[Tensor | None] = []
        for group, part in zip(self.groups, h, strict=True):
            mine, Bs = [d_outs[layer] for layer in group.layers], self.Bs[group.adapters]
            d_h, found = group.products.d_h_and_d_B(
                mine, Bs, part, group.scaling, needed[group.adapters]
            )
            d_hs.append(d_h)
            d_Bs += found
        return d_hs, d_Bs

    def factor_A(self, dtype: torch.dtype) -> Tensor | None:
        """Return A [K, D] of all adapters: d_h A, with d_h [T, K] of all groups, is the adapters'
        part of x's gradient.

        None if any group has dropout, or products in another dtype than `dtype`.
        """
        for group in self.groups:
            if group.mask is not None or group.products.dtype != dtype:
                return None
        return cat([group.products.factor_A(self.As[group.adapters]) for group in self.groups], 0)

    def d_x(self, d_h: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the adapters' part of x's gradient, [T, D] in `dtype`."""
        total: Tensor | None = None
        for group, part in zip(self.groups, d_h, strict=True):
            A = group.products.factor_A(self.As[group.adapters])
            if group.mask is not None and group.mask.within:
                total = add(total, part, A, group.mask)
                continue
            d_x = left((part @ A).to(dtype), group.mask)
            total = d_x if total is None else total.add_(d_x)
        assert total is not None
        return total

    def d_A(self, x: Tensor, d_h: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradient of each A; None for groups of which none is `needed`."""
        found: list[Tensor | None] = []
        for group, part in zip(self.groups, d_h, strict=True):
            As = self.As[group.adapters]
            wanted = any(needed[group.adapters])
            found += group.products.d_A(x, part, As, group.mask) if wanted else [None] * len(As)
        return found
