"""The products with A and B of LoRA's adapters: in one dtype, or of fp32 adapters as three parts of
bfloat16 for the tensor cores.

Adapters in fp32 on bfloat16 activations would be fp32 products of few columns, at a twentieth of
the tensor cores' speed. An fp32 number is the sum of three bfloat16 numbers to 2^-24, and a product
of two fp32 numbers is, to 2^-16, the sum of three products of their parts; so each such product is
one of half precision with three times the columns, summed in fp32.

Shapes: x [T, D]; n adapters with A [r, D] and B [F, r]; h = scaling x A^T of all adapters side by
side, and its gradient d_h.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from hf_packfree.ops.backend import HALF, on_hopper
from hf_packfree.ops.fused.dropped_products import Mask, gradient, left, times
from hf_packfree.ops.fused.lora_kernels import TILE_RANK, add_parts, gradients_at_once, split_fp32


class Products:
    """Products in one dtype, to which inputs and adapters are rounded.

    Attributes:
        dtype: of h and d_h.
        parts: columns of h and d_h per column of the rank.
    """

    parts = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def h(
        self, x: Tensor, As: Sequence[Tensor], scaling: float, mask: Mask | None = None
    ) -> Tensor:
        """Return scaling x A^T of each A, side by side, [T, n parts r], where a mask leaves x."""
        if mask is not None and mask.within:
            return times(x, self.factor_A(As), mask, scaling, self.dtype)
        return scaled_product(left(x, mask).to(self.dtype), self.factor_A(As).T, scaling)

    def d_h(self, d_outs: Sequence[Tensor], Bs: Sequence[Tensor], scaling: float) -> Tensor:
        """Return scaling d_out B of each pair of d_out [T, F] and B, side by side, [T, n parts
        r].
        """
        each = zip(d_outs, Bs, strict=True)
        return cat(
            [scaled_product(d.to(self.dtype), B.to(self.dtype), scaling) for d, B in each], 1
        )

    def d_A(
        self, x: Tensor, d_h: Tensor, As: Sequence[Tensor], mask: Mask | None = None
    ) -> Sequence[Tensor]:
        """Return the gradient of each A, in its dtype."""
        if mask is not None and mask.within:
            return gradient(d_h, x, mask, As[0].dtype).chunk(len(As))
        return product_in(d_h.T, left(x, mask).to(self.dtype), As[0].dtype).chunk(len(As))

    def d_B(self, d_out: Tensor, h: Tensor, B: Tensor) -> Tensor:
        """Return the gradient of one B, in its dtype, given its adapter's h."""
        return product_in(d_out.to(self.dtype).T, h, B.dtype)

    def factors_B(self, Bs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return each B as [F, parts r], for products with its adapter's h."""
        return [B.to(self.dtype) for B in Bs]

    def factor_A(self, As: Sequence[Tensor]) -> Tensor:
        """Return all A, one above the other, as [n parts r, D], for products with d_h."""
        return cat(As, 0).to(self.dtype)

    def d_h_and_d_B(
        self,
        d_outs: Sequence[Tensor],
        Bs: Sequence[Tensor],
        h: Tensor,
        scaling: float,
        needed: Sequence[bool],
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return d_h, and the gradient of each B that is `needed`.

        On Hopper one kernel reads each d_out once for both (its tiles need Hopper's shared memory).
        """
        d_out = d_outs[0]
        known = self.dtype == d_out.dtype and d_out.dtype in HALF and Bs[0].shape[1] <= TILE_RANK
        if not any(needed) or not known or not on_hopper(d_out.device):
            each = zip(d_outs, h.chunk(len(Bs), 1), Bs, needed, strict=True)
            return self.d_h(d_outs, Bs, scaling), [
                self.d_B(d, one, B) if needs else None for d, one, B, needs in each
            ]
        d_h = d_out.new_empty(h.shape)
        split = self.parts > 1
        return d_h, [*gradients_at_once(d_outs, Bs, h, d_h, scaling, split=split)]


class SplitFp32(Products):
    """Products of fp32 adapters with bfloat16 inputs. h is [T, n 3 r]: for each adapter [h1, h1,
    h2], its two leading bfloat16 parts (README).
    """

    parts = 3

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)

    def h(
        self, x: Tensor, As: Sequence[Tensor], scaling: float, mask: Mask | None = None
    ) -> Tensor:
        if mask is not None and mask.within:
            wide = times(x, _split_A(As), mask, 1.0, torch.float32)
        else:
            wide = wide_product(left(x, mask), _split_A(As).T)
        return add_parts(wide, x.new_empty(wide.shape), As[0].shape[0], scaling)

    def d_h(self, d_outs: Sequence[Tensor], Bs: Sequence[Tensor], scaling: float) -> Tensor:
        rank = Bs[0].shape[1]
        d_h = d_outs[0].new_empty(d_outs[0].shape[0], 3 * rank * len(Bs))
        for d_out, B, columns in zip(d_outs, Bs, d_h.chunk(len(Bs), 1), strict=True):
            wide = wide_product(d_out, split_fp32([B], rank).view(B.shape[0], -1))
            add_parts(wide, columns, rank, scaling)
        return d_h

    def d_A(
        self, x: Tensor, d_h: Tensor, As: Sequence[Tensor], mask: Mask | None = None
    ) -> Sequence[Tensor]:
        if mask is not None and mask.within:
            wide = gradient(d_h, x, mask, torch.float32)
        else:
            wide = wide_product(d_h.T, left(x, mask))
        parts = wide.view(len(As), 3, -1, x.shape[1])
        return (parts.select(1, 1) + parts.select(1, 2)).unbind()

    def d_B(self, d_out: Tensor, h: Tensor, B: Tensor) -> Tensor:
        rank = B.shape[1]
        return wide_product(d_out.T, h[:, rank:]).view(-1, 2, rank).sum(1)

    def factors_B(self, Bs: Sequence[Tensor]) -> Sequence[Tensor]:
        rank = Bs[0].shape[1]
        joined = split_fp32(Bs, rank, paired=True).view(-1, 3 * rank)
        return torch.split_with_sizes(joined, [B.shape[0] for B in Bs])

    def factor_A(self, As: Sequence[Tensor]) -> Tensor:
        return _split_A(As, paired=True)


@cache
def products_for(x: torch.dtype, adapters: torch.dtype, tensor_cores: bool) -> Products:
    """Return the products of x in dtype `x` with adapters in dtype `adapters`; `SplitFp32` only for
    bfloat16, since float16 has too few exponents to hold the parts of fp32.
    """
    splits = tensor_cores and adapters == torch.float32 and x == torch.bfloat16
    return SplitFp32() if splits else Products(adapters)


def _split_A(As: Sequence[Tensor], *, paired: bool = False) -> Tensor:
    """Return each A as its three parts, one above the other, [n 3 r, D]."""
    return split_fp32(As, As[0].numel(), paired=paired).view(-1, As[0].shape[1])


def on_tensor_cores(x: Tensor) -> bool:
    """Whether products in half precision are so much faster that three of them beat one in fp32."""
    return x.is_cuda


def wide_product(x: Tensor, w: Tensor) -> Tensor:
    """Return x w in fp32, given x and w in half precision."""
    return torch.mm(x, w, out_dtype=torch.float32)


def scaled_product(x: Tensor, w: Tensor, scaling: float) -> Tensor:
    """Return scaling x w, rounded once."""
    return torch.addmm(x.new_empty(1), x, w, beta=0, alpha=scaling)


def product_in(x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x w in `dtype`; on a GPU an fp32 result of half-precision factors is never rounded to
    half.
    """
    if dtype == torch.float32 and x.dtype in HALF and on_tensor_cores(x):
        return wide_product(x, w)
    return torch.mm(x, w).to(dtype)


def cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate; one part is returned as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)
