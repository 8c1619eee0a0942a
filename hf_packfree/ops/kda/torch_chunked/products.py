"""Products of the rows of a chunk, where every channel has its own decay.

    B_ij = sum over c of x_ic k_jc exp(G_ic - G_jc)    for j < i, else 0

A matrix product needs a factor of each row, but exp(-G_j) overflows where decay is strong. So
tokens j < i meet in a binary tree: on the level of s = 1, 2, 4, ..., C/2 tokens, i is in the upper
half of a block of 2 s and j in its lower one. With m the last token of the lower half, exp(G_i -
G_m) and exp(G_m - G_j) are at most 1, each summed from the decays between the two tokens alone:
exact for any decay.

Shapes: R rows of one chunk and head, C tokens of a chunk, a power of two; K head size; n = C/2s
blocks of a level.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_packfree.ops.chunked.scratch import Scratch


class DecayLevel(NamedTuple):
    """The decays of one level.

    Attributes:
        half: s.
        row: [R, n, s, K], exp(G_i - G_m) of the upper halves.
        column: [R, n, s, K], exp(G_m - G_j) of the lower halves.
    """

    half: int
    row: Tensor
    column: Tensor


def decayed_products(
    g: Tensor, k: Tensor, xs: Sequence[Tensor], outs: Sequence[Tensor], space: Scratch
) -> None:
    """Write B of each x to its `out`.

    Args:
        g: [R, C, K], log decay.
        k, xs: [R, C, K].
        outs: [R, C, C].
    """
    for out in outs:
        out.zero_()
    for level in _levels(g, space):
        columns = _column_rows(k, level, space)
        for x, out in zip(xs, outs, strict=True):
            rows = _row_rows(x, level, space)
            found = torch.bmm(rows, columns.mT)
            _blocks(out, level.half).copy_(found.view(len(k), -1, *found.shape[1:]))


def decayed_products_backward(
    g: Tensor,
    k: Tensor,
    xs: Sequence[Tensor],
    d_outs: Sequence[Tensor],
    d_k: Tensor,
    d_xs: Sequence[Tensor],
    space: Scratch,
) -> None:
    """Write the gradients of k to `d_k` and of each x to its `d_x`, [R, C, K].

    The gradient of G needs no further products: channel by channel, it is x_i d_x_i summed over the
    xs, less k_i d_k_i.

    Args:
        g, k, xs: as above.
        d_outs: [R, C, C], of which only what is below the diagonal is read.
    """
    for d in (d_k, *d_xs):
        d.zero_()
    for level in _levels(g, space):
        columns, d_lower = _column_rows(k, level, space), _halves(d_k, level.half)[0]
        for x, d_out, d_x in zip(xs, d_outs, d_xs, strict=True):
            blocks = _blocks(d_out, level.half).flatten(0, 1)
            found = torch.bmm(blocks, columns).view_as(level.row)
            _halves(d_x, level.half)[1].addcmul_(found, level.row)
            found = torch.bmm(blocks.mT, _row_rows(x, level, space)).view_as(level.column)
            d_lower.addcmul_(found, level.column)


def _levels(g: Tensor, space: Scratch) -> Iterator[DecayLevel]:
    half = 1
    while half < g.shape[1]:
        lower, upper = _halves(g, half)
        row = torch.cumsum(upper, 2, out=space.like("level row", upper)).exp_()
        column = space.like("level column", lower)
        column[:, :, -1] = 0
        if half > 1:
            column[:, :, :-1] = lower[:, :, 1:].flip(2).cumsum(2).flip(2)
        yield DecayLevel(half, row, column.exp_())
        half *= 2


def _row_rows(x: Tensor, level: DecayLevel, space: Scratch) -> Tensor:
    """Return the decayed rows of the upper halves, [R n, s, K]."""
    upper = _halves(x, level.half)[1]
    return torch.mul(upper, level.row, out=space.like("level rows", upper)).flatten(0, 1)


def _column_rows(k: Tensor, level: DecayLevel, space: Scratch) -> Tensor:
    """Return the decayed rows of the lower halves, [R n, s, K]."""
    lower = _halves(k, level.half)[0]
    return torch.mul(lower, level.column, out=space.like("level columns", lower)).flatten(0, 1)


def _halves(x: Tensor, half: int) -> tuple[Tensor, ...]:
    """View the lower and the upper halves [R, n, s, K] of [R, C, K]."""
    return x.view(len(x), -1, 2, half, x.shape[-1]).unbind(2)


def _blocks(x: Tensor, half: int) -> Tensor:
    """View the blocks of [R, C, C] between upper and lower halves, [R, n, s, s]."""
    blocks = x.view(len(x), -1, 2, half, x.shape[2] // (2 * half), 2, half)
    return blocks[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
