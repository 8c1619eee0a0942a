"""Reading tensors of tokens and heads into rows of one chunk and head each, and writing rows back.

Shapes: T tokens, H heads, D head size; M chunks of C tokens and h heads of a block, R = M x h rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_packfree.ops.delta_rule.layout import Window
from hf_packfree.ops.delta_rule.scratch import Scratch


class TokenReader:
    """Gathers rows from x [T, H, D] or [T, H] of any strides."""

    def __init__(self, x: Tensor) -> None:
        """Lay a table of head vectors over x without a copy if its strides allow, as those of a split projection do."""
        if x.dim() == 2:
            x = x[..., None].contiguous()
        length, heads, size = x.shape
        if x.stride()[1:] != (size, 1) or x.stride(0) % size:
            x = x.contiguous()
        self.stride = x.stride(0) // size
        self.table = x.as_strided(((length - 1) * self.stride + heads, size), (size, 1))

    def read(self, heads: slice, window: Window, name: str, space: Scratch, zero_padding: bool = False) -> Tensor:
        """Return [R, C, D] as the buffer `name`; padding repeats its document's last token, or holds zero."""
        index = window.places("tokens", self.stride, heads)
        found = space(name, index.numel(), self.table.shape[1])
        if self.table.dtype == space.dtype:
            torch.index_select(self.table, 0, index.flatten(), out=found)
        else:
            found.copy_(self.table.index_select(0, index.flatten()))
        if zero_padding and window.padding.numel():
            found.index_fill_(0, _padding(window, index), 0)
        return found.view(-1, index.shape[-1], found.shape[-1])


class TokenWriter:
    """Collects rows into [1, T, H, D] or [1, T, H]; what padding holds goes to a token past the end."""

    def __init__(self, like: Tensor) -> None:
        """`like` [T, ...] gives shape, dtype and device."""
        self.whole = like.new_empty(len(like) + 1, *like.shape[1:])
        self.heads = like.shape[1]

    def write(self, rows: Tensor, heads: slice, window: Window) -> None:
        """Scatter `rows` [R, C, D] or [R, C]."""
        table = self.whole.view(len(self.whole) * self.heads, -1)
        index = window.places("targets", self.heads, heads)
        rows = rows.reshape(-1, table.shape[1]).to(table.dtype)
        if table.shape[1] * table.element_size() % 16 == 0 and rows.is_contiguous():
            table, rows = table.view(torch.complex128), rows.view(torch.complex128)  # moved in pieces of 16 bytes
        table.index_copy_(0, index.flatten(), rows)

    def result(self) -> Tensor:
        """Return what was written."""
        return self.whole[None, :-1]


def _padding(window: Window, index: Tensor) -> Tensor:
    """Where the padding lies in rows of `index` [M, h, C]."""
    _, heads, chunk = index.shape
    first = window.padding + (heads - 1) * chunk * (window.padding // chunk)
    return (first[:, None] + torch.arange(heads, device=index.device) * chunk).flatten()
