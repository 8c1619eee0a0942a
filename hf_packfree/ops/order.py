"""The order in which a kernel of the delta rule takes documents: the longest first.

Such a kernel walks each head of each document from its first chunk to its last, and takes documents as they lie: where a long
one comes late, it is still at it when the rest of the GPU is done.  What comes before the delta rule and after it is written
and read token by token, so it puts the documents into another order, and back, without a pass of its own over memory.
Documents do not meet, so that none of their bits changes.

Shapes: T tokens of the row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_packfree.packing import PackedSequence

_CHUNK = 64
"""Tokens that such kernels take at a time: documents of as many chunks take as long."""


class Order(NamedTuple):
    """The documents of a row in another order.

    Attributes:
        packed: where they lie in it.
        rows: int32 [T], on the model's device: where each token of the row lies in it.
    """

    packed: PackedSequence
    rows: Tensor


def longest_first(packed: PackedSequence) -> Order | None:
    """Return the documents by their number of chunks, or None where none has more of them than one before it."""
    lengths = packed.cu_seqlens_cpu.diff()
    chunks = (lengths + _CHUNK - 1) // _CHUNK
    if not bool((chunks.diff() > 0).any()):
        return None
    order, device = chunks.argsort(descending=True, stable=True), packed.cu_seqlens.device
    other = PackedSequence.from_lengths(lengths[order], device=device)
    shift = torch.empty_like(lengths)
    shift[order] = other.cu_seqlens_cpu[:-1] - packed.cu_seqlens_cpu[:-1][order]
    tokens = torch.arange(packed.num_tokens, dtype=torch.int32, device=device)
    return Order(other, tokens + shift.to(device, non_blocking=True).index_select(0, packed.seq_idx[0]))


def moved(x: Tensor, rows: Tensor | None) -> Tensor:
    """Return x [1, T, ...] with each token where `rows` says; None: as it is."""
    return x if rows is None else torch.empty_like(x).index_copy(1, rows.long(), x)


def moved_back(x: Tensor, rows: Tensor | None) -> Tensor:
    """Return x [1, T, ...] with each token back from where `rows` says; None: as it is."""
    return x if rows is None else x.index_select(1, rows)
