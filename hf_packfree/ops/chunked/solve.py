"""The inverse of unit lower triangular matrices, one per chunk and head."""

from __future__ import annotations

import torch
from torch import Tensor

# side of the diagonal blocks that are eliminated row by row
_BASE = 8


def unit_lower_inverse(strict: Tensor, out: Tensor) -> Tensor:
    """Write (I + strict)^-1 to `out`, block by block, and return it.

    Args:
        strict: [R, C, C], of which only what is below the diagonal is read; C is `_BASE` times a
            power of two.

    Returns:
        `out` [R, C, C], lower triangular, exact zeros above the diagonal.

    Diagonal blocks are eliminated column by column; then [[A, 0], [B, D]]^-1 = [[A', 0], [-D' B A',
    D']] doubles their side until one is left. Unlike the Neumann product (I - S)(I + S^2)(I +
    S^4)..., whose powers of S grow beyond fp32 when keys repeat, every intermediate is a part of
    the answer or one product away from it.
    """
    side = strict.shape[-1]
    inverse = out.zero_()
    _diagonal_blocks(inverse).copy_(_eliminate(_diagonal_blocks(strict)))
    size = _BASE
    while size < side:
        for low in range(0, side, 2 * size):
            mid, high = low + size, low + 2 * size
            product = torch.bmm(strict[:, mid:high, low:mid], inverse[:, low:mid, low:mid])
            torch.neg(
                torch.bmm(inverse[:, mid:high, mid:high], product),
                out=inverse[:, mid:high, low:mid],
            )
        size *= 2
    return inverse


def _diagonal_blocks(x: Tensor) -> Tensor:
    """View the diagonal blocks of [R, C, C] as [b, b, R, C/b]: batch last, so that the
    elimination vectorises.
    """
    blocks: Tensor = x.view(len(x), -1, _BASE, x.shape[2] // _BASE, _BASE)
    return blocks.diagonal(dim1=1, dim2=3).permute(1, 2, 0, 3)


def _eliminate(strict: Tensor) -> Tensor:
    """Invert I + strict for strict [b, b, ...] by subtracting multiples of each row from the rows
    below it.

    Multiply and subtract are two calls because a fused one may round differently at the edge of a
    vector register, and values must not depend on a document's position in the row.
    """
    strict = strict.contiguous()
    inverse = torch.zeros_like(strict)
    inverse.diagonal(dim1=0, dim2=1).fill_(1)
    for row in range(len(strict) - 1):
        inverse[row + 1 :, : row + 1] -= (
            strict[row + 1 :, row, None] * inverse[None, row, : row + 1]
        )
    return inverse
