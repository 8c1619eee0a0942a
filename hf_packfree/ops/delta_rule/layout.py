"""How the tokens of a packed row are laid out in chunks, so that no chunk holds tokens of two documents.

Every document is cut into chunks of C tokens, its last one padded.  Chunks are ordered by time: first the first chunk
of every document, longest document first, then the second chunk of every document that has one, and so on.  The chunks
of one time step are then a slice, and the documents that go on to the next step are the first ones of that slice.

Shapes: T tokens, N documents, M chunks, C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_packfree.packing import PackedSequence


@dataclass(frozen=True)
class Step:
    """The chunks `first` to `first + docs - 1`; the documents of the first `going_on` of them have a next chunk."""

    first: int
    docs: int
    going_on: int


@dataclass(frozen=True, eq=False)
class ChunkLayout:
    """Where the M chunks of a row are, and which token each of their slots holds.

    Attributes:
        chunk: C.
        num_chunks: M.
        steps: the time steps, in order.
        tokens: int64 [M*C], the token of each slot; padding slots repeat their document's last token, so that no value
            of another document, not even a NaN, comes near.  None if slot i holds token i.
        padding: int64 [P], the slots that hold no token of their own.
        slots: int64 [T], the slot of each token, or None as above.
    """

    chunk: int
    num_chunks: int
    steps: tuple[Step, ...]
    tokens: Tensor | None
    padding: Tensor | None
    slots: Tensor | None

    def take(self, x: Tensor) -> Tensor:
        """Lay out x [T, ...] as [M, C, ...]; a view where no token moves."""
        laid = x if self.tokens is None else x.index_select(0, self.tokens)
        return laid.view(self.num_chunks, self.chunk, *x.shape[1:])

    def take_gradient(self, x: Tensor) -> Tensor:
        """Like `take`, but padding slots hold zero: nothing reads what they compute."""
        laid = self.take(x)
        if self.padding is not None:
            laid.flatten(0, 1).index_fill_(0, self.padding, 0)
        return laid

    def put_back(self, x: Tensor) -> Tensor:
        """Undo `take`: [M, C, ...] back to [T, ...]."""
        flat = x.flatten(0, 1)
        return flat if self.slots is None else flat.index_select(0, self.slots)


def plan_chunks(packed: PackedSequence, chunk: int) -> ChunkLayout:
    """Build the layout on the host, in O(T), and move it to the row's device."""
    device = packed.cu_seqlens.device
    bounds = packed.cu_seqlens_cpu.long()
    counts = (bounds.diff() + chunk - 1) // chunk
    order = counts.argsort(descending=True, stable=True)
    docs = packed.num_segments - counts.bincount().cumsum(0)  # docs[j]: documents of more than j chunks; the last is 0
    first = docs.cumsum(0) - docs
    steps = tuple(Step(*at) for at in zip(first[:-1].tolist(), docs[:-1].tolist(), docs[1:].tolist(), strict=True))
    num_chunks = int(counts.sum())
    if num_chunks * chunk == packed.num_tokens and packed.num_segments == 1:
        return ChunkLayout(chunk, num_chunks, steps, None, None, None)

    step_of_chunk = torch.arange(len(docs)).repeat_interleave(docs)
    doc_of_chunk = order[torch.arange(num_chunks) - first[step_of_chunk]]
    tokens = (bounds[doc_of_chunk] + step_of_chunk * chunk)[:, None] + torch.arange(chunk)
    last = bounds[doc_of_chunk + 1, None] - 1
    real = (tokens <= last).flatten()
    tokens = tokens.minimum(last).flatten()
    slots = torch.empty(packed.num_tokens, dtype=torch.int64)
    slots[tokens[real]] = real.nonzero()[:, 0]
    padding = (~real).nonzero()[:, 0]
    return ChunkLayout(chunk, num_chunks, steps, tokens.to(device), padding.to(device), slots.to(device))
