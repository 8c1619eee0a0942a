"""The layout of a packed row in chunks, none of which holds tokens of two documents, and reading
and writing rows of it.

Every document is cut into chunks of C tokens, its last one padded. Chunks are ordered by time:
first the first chunk of every document, longest document first, then the second chunk of every
document that has one, and so on. The chunks of one time step are then a slice, and the documents
that go on to the next step are the first ones of that slice.

Shapes: T tokens, H heads, D head size, N documents, M chunks of a window, C tokens of a chunk, h
heads of a block, R = M x h rows, of one chunk and head each.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_packfree.ops.chunked.scratch import Scratch
from hf_packfree.packing import PackedSequence

# `widen` pads sizes of heads and states to a multiple of this
_WIDTH = 16


class Step(NamedTuple):
    """The chunks of one time step: of `docs` documents, the first `going_on` of which have a chunk
    in the next step.
    """

    docs: int
    going_on: int
    opens: bool


class Window(NamedTuple):
    """The M chunks of some consecutive time steps.

    Attributes:
        first: chunks of the windows before this one.
        steps: in order.
        tokens: int64 [M, 1, C], the token that each position of a chunk reads. Padding reads the
            last token of its own document, so that no value of another document, not even a NaN,
            comes near.
        targets: int64 [M, 1, C], the token that each position writes to; T for padding.
        padding: int64 [P], the positions (of M x C) that are padding.
        cache: results of `head_rows`, which are the same for every layer.
    """

    first: int
    steps: tuple[Step, ...]
    tokens: Tensor
    targets: Tensor
    padding: Tensor
    cache: dict[Any, Tensor]

    @property
    def num_chunks(self) -> int:
        """M, the number of chunks."""
        return len(self.tokens)

    def rows(self, heads: int) -> slice:
        """Return where the window's rows are among the rows of all windows, at `heads` rows a
        chunk.
        """
        return slice(self.first * heads, (self.first + self.num_chunks) * heads)

    def steps_with_states(self, *, final: bool) -> tuple[Step, ...]:
        """Return the window's steps for documents that begin with an initial state; `final`: whose
        final states are read too.
        """
        return tuple(
            Step(step.docs, step.docs if final else step.going_on, False) for step in self.steps
        )

    def head_rows(self, which: str, stride: int, heads: slice) -> Tensor:
        """Return the rows of a table with `stride` rows per token for the heads of "tokens" or
        "targets": int64 [M, h, C].
        """
        key = (which, stride, heads.start, heads.stop)
        if key not in self.cache:
            tokens = self.tokens if which == "tokens" else self.targets
            numbers = torch.arange(heads.start, heads.stop, device=tokens.device)
            self.cache[key] = tokens * stride + numbers[:, None]
        return self.cache[key]


def widen(x: Tensor) -> Tensor:
    """Pad x [..., D] with zeros to whole cache lines: with other sizes, matrix products round by
    the address of their operands.
    """
    return x if x.shape[-1] % _WIDTH == 0 else F.pad(x, (0, -x.shape[-1] % _WIDTH))


def plan_windows(packed: PackedSequence, chunk: int, limit: int) -> tuple[Window, ...]:
    """Lay the row out and cut it into windows of at most `limit` chunks, or of one step.

    Built on the host, in O(T), and moved to the row's device.
    """
    bounds = packed.cu_seqlens_cpu.long()
    counts, order = _by_chunks(packed, chunk)
    # docs[j]: documents of more than j chunks; the last is 0
    docs = packed.num_segments - counts.bincount().cumsum(0)
    number = torch.from_numpy(np.repeat(np.arange(len(docs)), docs.numpy()))
    doc = order[torch.arange(len(number), device="cpu") - (docs.cumsum(0) - docs)[number]]
    token = (bounds[doc] + number * chunk)[:, None, None] + torch.arange(chunk, device="cpu")
    end = bounds[doc + 1, None, None]
    tables = token.minimum(end - 1), token.where(token < end, packed.num_tokens)

    windows, first = [], 0
    for steps in _group_steps(docs.tolist(), limit):
        last = first + sum(step.docs for step in steps)
        tokens, targets = (table[first:last] for table in tables)
        padding = (targets == packed.num_tokens).flatten().nonzero()[:, 0]
        tokens, targets, padding = (
            x.to(packed.cu_seqlens.device, non_blocking=True) for x in (tokens, targets, padding)
        )
        windows.append(Window(first, steps, tokens, targets, padding, {}))
        first = last
    return tuple(windows)


def document_order(packed: PackedSequence, chunk: int) -> Tensor:
    """Return int64 [N] on the row's device: the documents in the order of a step's chunks."""
    return _by_chunks(packed, chunk)[1].to(packed.cu_seqlens.device, non_blocking=True)


def _by_chunks(packed: PackedSequence, chunk: int) -> tuple[Tensor, Tensor]:
    """Return how many chunks each document has, and the documents with the most chunks first;
    int64 [N] on the host.
    """
    counts = (packed.cu_seqlens_cpu.long().diff() + chunk - 1) // chunk
    return counts, counts.argsort(descending=True, stable=True)


def _group_steps(docs: list[int], limit: int) -> Iterator[tuple[Step, ...]]:
    """Group the time steps, of `docs` chunks each (and none in the last), into windows of at
    most `limit` chunks.
    """
    group: list[Step] = []
    room = limit
    for number, (now, after) in enumerate(pairwise(docs)):
        if group and now > room:
            yield tuple(group)
            group, room = [], limit
        group.append(Step(now, after, number == 0))
        room -= now
    yield tuple(group)


class TokenReader:
    """Gathers rows from x [T, H, D] or [T, H] of any strides."""

    def __init__(self, x: Tensor) -> None:
        """Lay a table of head vectors over x without a copy if its strides allow, as those of a
        split projection do.
        """
        if x.dim() == 2:
            x = x[..., None].contiguous()
        length, heads, size = x.shape
        if x.stride()[1:] != (size, 1) or x.stride(0) % size:
            x = x.contiguous()
        self.stride = x.stride(0) // size
        self.table = x.as_strided(((length - 1) * self.stride + heads, size), (size, 1))

    def read(
        self, heads: slice, window: Window, name: str, space: Scratch, zero_padding: bool = False
    ) -> Tensor:
        """Return [R, C, D] as the buffer `name`; padding repeats its document's last token, or
        holds zero.
        """
        index = window.head_rows("tokens", self.stride, heads)
        found = space(name, index.numel(), self.table.shape[1])
        if self.table.dtype == space.dtype:
            torch.index_select(self.table, 0, index.flatten(), out=found)
        else:
            found.copy_(self.table.index_select(0, index.flatten()))
        if zero_padding and window.padding.numel():
            found.index_fill_(0, _padding(window, index), 0)
        return found.view(-1, index.shape[-1], found.shape[-1])


class TokenWriter:
    """Collects rows into [1, T, H, D] or [1, T, H]; padding is written to a token past the end."""

    def __init__(self, like: Tensor) -> None:
        """`like` [T, ...] gives shape, dtype and device."""
        self.whole = like.new_empty(len(like) + 1, *like.shape[1:])
        self.heads = like.shape[1]

    def write(self, rows: Tensor, heads: slice, window: Window) -> None:
        """Scatter `rows` [R, C, D] or [R, C]."""
        table = self.whole.view(len(self.whole) * self.heads, -1)
        index = window.head_rows("targets", self.heads, heads)
        rows = rows.reshape(-1, table.shape[1]).to(table.dtype)
        if table.shape[1] * table.element_size() % 16 == 0 and rows.is_contiguous():
            # copied 16 bytes at a time
            table, rows = table.view(torch.complex128), rows.view(torch.complex128)
        table.index_copy_(0, index.flatten(), rows)

    def result(self) -> Tensor:
        """Return what was written."""
        return self.whole[None, :-1]


def _padding(window: Window, index: Tensor) -> Tensor:
    """The padding's positions in rows of `index` [M, h, C]."""
    _, heads, chunk = index.shape
    first = window.padding + (heads - 1) * chunk * (window.padding // chunk)
    return (first[:, None] + torch.arange(heads, device=index.device) * chunk).flatten()
