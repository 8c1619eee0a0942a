"""The products of low-rank adapters: in their own dtype, or fp32 taken apart for the tensor cores
of half precision.

Adapters in fp32 on bfloat16 activations would be fp32 products of few columns, at a twentieth of
the tensor cores' speed. An fp32 number is the sum of three bfloat16 numbers to 2^-24, and a product
of fp32 numbers that of their leading parts and the mixed ones to 2^-16; so each such product is one
of half precision with three times the columns, summed in fp32.

Shapes: T tokens, D inputs, F outputs, r the rank, n adapters side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_packfree.ops.backend import HALF, block_width, on_hopper
from hf_packfree.ops.fused.reduce import sum_partials
from hf_packfree.ops.launch import launch

# elements of a program
_BLOCK = 1024
# of `gradients_at_once`: outputs of a tile at least, programs
_NARROWEST, _PROGRAMS = 16, 264
# of its tiles; with a higher one the partial sums are more to write and read than a second reading
# of d_out
_RANK = 16


@dataclass(frozen=True)
class Tile:
    """Of `gradients_at_once`: tokens, outputs, warps of a program, and how many it loads ahead."""

    rows: int
    outputs: int
    warps: int
    stages: int


_TILE, _SPLIT_TILE = Tile(32, 512, 8, 3), Tile(64, 128, 4, 3)
"""Of adapters in half precision, and of those in fp32, which take more of the shared memory."""


@dataclass(frozen=True)
class Plain:
    """Products in one dtype, to which adapters in another are rounded.  What is inner is [T, n r],
    in that dtype.
    """

    dtype: torch.dtype
    parts: ClassVar[int] = 1
    """Columns of what is inner, for each of the rank."""

    def inner(self, x: Tensor, downs: Sequence[Tensor], scale: float) -> Tensor:
        """Return scale x A' of each A [r, D], of x [T, D]."""
        return scaled_product(x.to(self.dtype), self.down_factor(downs, x).T, scale)

    def up_factor(self, up: Tensor, like: Tensor) -> Tensor:
        """Return what is multiplied with what is inner of an adapter: its B [F, r], [F, parts
        r].
        """
        return up.to(self.dtype)

    def inner_gradient(
        self, d_outs: Sequence[Tensor], ups: Sequence[Tensor], scale: float
    ) -> Tensor:
        """Return scale d_out B, side by side, of each d_out [T, F] and B [F, r]."""
        each = ((d_out.to(self.dtype), up.to(self.dtype)) for d_out, up in zip(d_outs, ups))
        return cat([scaled_product(*pair, scale) for pair in each], 1)

    def down_factor(self, downs: Sequence[Tensor], like: Tensor) -> Tensor:
        """Return what is multiplied with the inner gradients: each A [r, D], one above the
        other, [n parts r, D].
        """
        return cat(downs, 0).to(self.dtype)

    def down_gradients(
        self, x: Tensor, d_inner: Tensor, downs: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return the gradients of each A [r, D], in its dtype."""
        return product_in(d_inner.T, x.to(self.dtype), downs[0].dtype).chunk(len(downs))

    def up_gradient(self, d_out: Tensor, inner: Tensor, up: Tensor) -> Tensor:
        """Return the gradient of a B [F, r], in its dtype, given what is inner of its adapter."""
        return product_in(d_out.to(self.dtype).T, inner, up.dtype)


class Split:
    """Products of fp32 adapters with bfloat16. What is inner is [T, n 3 r]: of each adapter
    (high, high, low).
    """

    parts = 3

    @staticmethod
    def inner(x: Tensor, downs: Sequence[Tensor], scale: float) -> Tensor:
        """See `Plain`; so are the others."""
        wide = wide_product(x, _split_downs(downs, x.dtype).T)
        return in_pairs(wide, downs[0].shape[0], scale, x.new_empty(wide.shape))

    @staticmethod
    def up_factor(up: Tensor, like: Tensor) -> Tensor:
        return split(up, up.shape[1], like.dtype, paired=True).view(up.shape[0], -1)

    @staticmethod
    def inner_gradient(d_outs: Sequence[Tensor], ups: Sequence[Tensor], scale: float) -> Tensor:
        rank = ups[0].shape[1]
        joint = d_outs[0].new_empty(d_outs[0].shape[0], 3 * rank * len(ups))
        for d_out, up, columns in zip(d_outs, ups, joint.split(3 * rank, 1), strict=True):
            wide = wide_product(d_out, split(up, rank, d_out.dtype).view(up.shape[0], -1))
            in_pairs(wide, rank, scale, columns)
        return joint

    @staticmethod
    def down_factor(downs: Sequence[Tensor], like: Tensor) -> Tensor:
        return _split_downs(downs, like.dtype, paired=True)

    @staticmethod
    def down_gradients(x: Tensor, d_inner: Tensor, downs: Sequence[Tensor]) -> Sequence[Tensor]:
        parts = wide_product(d_inner.T, x).view(len(downs), 3, -1, x.shape[1])
        return (parts[:, 1] + parts[:, 2]).unbind()

    @staticmethod
    def up_gradient(d_out: Tensor, inner: Tensor, up: Tensor) -> Tensor:
        rank = inner.shape[1] // 3
        return wide_product(d_out.T, inner[:, rank:]).view(-1, 2, rank).sum(1)


def outer_gradients(
    products: Any,
    d_outs: Sequence[Tensor],
    ups: Sequence[Tensor],
    inner: Sequence[Tensor],
    scale: float,
    wanted: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """Return scale d_out B, side by side as `products` has it, and d_out' h where it is `wanted`,
    of each adapter.

    Args:
        products: of `Plain` or `Split`.
        d_outs, ups: [T, F] and B [F, r] each.
        inner: what is inner of each adapter alone, h.
    """
    if not any(wanted) or not all(reads_once(products, *each) for each in zip(d_outs, ups)):
        d_inner = products.inner_gradient(d_outs, ups, scale)
        each = zip(d_outs, inner, ups, wanted, strict=True)
        return d_inner, [
            products.up_gradient(d_out, h, up) if wants else None for d_out, h, up, wants in each
        ]
    width = products.parts * ups[0].shape[1]
    d_inner = d_outs[0].new_empty(d_outs[0].shape[0], width * len(ups))
    columns = d_inner.split(width, 1)
    split = isinstance(products, Split)
    return d_inner, [
        gradients_at_once(*each, scale, split=split)
        for each in zip(d_outs, ups, inner, columns, strict=True)
    ]


def gradients_at_once(
    d_out: Tensor, up: Tensor, inner: Tensor, d_inner: Tensor, scale: float, *, split: bool
) -> Tensor:
    """Return d_out' h in B's dtype, and write scale d_out B into `d_inner`: d_out is read once.

    Args:
        d_out: [T, F], half precision.
        up: B [F, r], in d_out's dtype, or fp32.
        inner, d_inner: [T, r], or [T, 3 r] where `split`.
        split: whether B, in fp32, is taken apart, see `Split`; otherwise it is rounded.
    """
    from hf_packfree.ops.fused.kernels.low_rank import outer_gradients

    (tokens, outputs), rank = d_out.shape, up.shape[1]
    d_out, up = d_out if d_out.stride(1) == 1 else d_out.contiguous(), up.contiguous()
    tile = _SPLIT_TILE if split else _TILE
    height = min(block_width(max(outputs, _NARROWEST)), tile.outputs)
    blocks = -(-outputs // height)
    steps = max(1, -(-tokens // (tile.rows * max(1, _PROGRAMS // blocks))))
    programs = -(-tokens // (tile.rows * steps))
    parts = d_out.new_empty(blocks, tokens, rank, dtype=torch.float32)
    d_ups = d_out.new_empty(programs, outputs, rank, dtype=torch.float32)
    h = inner[:, rank:] if split else inner
    launch(
        outer_gradients,
        (blocks, programs),
        d_out,
        up,
        h,
        parts,
        d_ups,
        tokens,
        outputs,
        rank,
        d_out.stride(0),
        h.stride(0),
        steps,
        PARTS=4 if split else 1,
        PAIRS=2 if split else 1,
        ROWS=tile.rows,
        OUTPUTS=height,
        RANK=_RANK,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    add_parts(
        parts,
        d_inner,
        (tokens, rank),
        rank,
        (rank, rank, tokens * rank),
        blocks,
        scale,
        paired=split,
    )
    return sum_partials(d_ups, up.dtype)


def _split_downs(downs: Sequence[Tensor], dtype: torch.dtype, *, paired: bool = False) -> Tensor:
    """Return each A [r, D] as its three parts, one above the other, [n 3 r, D]."""
    return split(cat(downs, 0), downs[0].numel(), dtype, paired=paired).view(-1, downs[0].shape[1])


def products_of(x: Tensor, dtype: torch.dtype) -> Any:
    """Return `Split` or `Plain`, for products in that dtype of adapters with x; float16 has too
    few exponents to hold the parts.
    """
    splits = dtype == torch.float32 and x.dtype == torch.bfloat16 and on_tensor_cores(x)
    return Split() if splits else Plain(dtype)


def reads_once(products: Any, d_out: Tensor, up: Tensor) -> bool:
    """Whether `gradients_at_once` is for them, whose tiles fill the shared memory of a Hopper
    GPU.
    """
    known = isinstance(products, Split) or products.dtype == d_out.dtype
    return known and d_out.dtype in HALF and up.shape[1] <= _RANK and on_hopper(d_out.device)


def on_tensor_cores(x: Tensor) -> bool:
    """Whether products in half precision are worth more of them."""
    return x.is_cuda


def wide_product(x: Tensor, w: Tensor) -> Tensor:
    """Return x w in fp32, both of half precision."""
    return torch.mm(x, w, out_dtype=torch.float32)


def scaled_product(x: Tensor, w: Tensor, scale: float) -> Tensor:
    """Return scale x w, rounded once."""
    return torch.addmm(x.new_empty(1), x, w, beta=0, alpha=scale)


def product_in(x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x w in that dtype, rounded once where a GPU multiplies for an fp32 result."""
    if dtype == torch.float32 and x.dtype in HALF and on_tensor_cores(x):
        return wide_product(x, w)
    return torch.mm(x, w).to(dtype)


def split(w: Tensor, width: int, dtype: torch.dtype, *, paired: bool = False) -> Tensor:
    """Return w, in fp32, as three parts of `dtype` whose sum it is to 2^-24 in bfloat16: [its
    elements / width, 3, width].

    `paired`: the first part, the second and the first again, to be multiplied with what `in_pairs`
    returns.
    """
    from hf_packfree.ops.fused.kernels.low_rank import split

    w = w.contiguous()
    parts = w.new_empty(w.numel() // width, 3, width, dtype=dtype)
    launch(
        split,
        (-(-w.numel() // _BLOCK),),
        w,
        parts,
        w.numel(),
        width,
        PAIRED=paired,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return parts


def in_pairs(wide: Tensor, rank: int, scale: float, out: Tensor) -> Tensor:
    """Return `out`, which gets the sums of each adapter's three parts in `wide`, [T, n 3 r], as
    (high, high, low).
    """
    return add_parts(
        wide,
        out,
        (wide.shape[0], wide.shape[1] // 3),
        rank,
        (wide.shape[1], 3 * rank, rank),
        3,
        scale,
        paired=True,
    )


def add_parts(
    wide: Tensor,
    out: Tensor,
    size: tuple[int, int],
    rank: int,
    strides: Sequence[int],
    parts: int,
    scale: float,
    *,
    paired: bool,
) -> Tensor:
    """Return `out`, which gets scale times the sum of parts in `wide`, or (high, high, low) of it
    where `paired`.

    Args:
        wide: fp32.
        size: (T, n r).
        strides: of a token, an adapter and a part in `wide`.
    """
    from hf_packfree.ops.fused.kernels.low_rank import add_parts

    count = size[0] * size[1]
    sizes = count, rank, size[1], *strides, parts, out.stride(0), float(scale)
    launch(
        add_parts,
        (-(-count // _BLOCK),),
        wide,
        out,
        *sizes,
        PAIRED=paired,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out


def cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate; one part is returned as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)


__all__ = ["Plain", "Split", "cat", "outer_gradients", "product_in", "products_of"]
