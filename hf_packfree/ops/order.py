"""The order in which a kernel of the delta rule takes documents: the longest first.

Such a kernel walks each head of each document from its first chunk to its last, and takes documents as they lie: where a long
one comes late, it is still at it when the rest of the GPU is done.  What comes before the delta rule and after it is written
and read token by token, so it puts the documents into another order, and back, without a pass of its own over memory.
Documents do not meet, so that none of their bits changes.

Shapes: T tokens of the row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_packfree.packing import PackedSequence

CHUNK = 64
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
    starts = packed.cu_seqlens_cpu.numpy()
    lengths = np.diff(starts)
    chunks = -(-lengths // CHUNK)
    if (chunks[1:] <= chunks[:-1]).all():
        return None
    order, device = np.argsort(-chunks, kind="stable"), packed.cu_seqlens.device
    other = PackedSequence.from_lengths(lengths[order], device=device)
    shift = np.empty_like(lengths)
    shift[order] = other.cu_seqlens_cpu.numpy()[:-1] - starts[order]
    tokens = torch.arange(packed.num_tokens, dtype=torch.int32, device=device)
    shifts = torch.from_numpy(shift).to(device, non_blocking=True)  # a document's; so short a copy waits for nothing
    return Order(other, tokens + shifts.index_select(0, packed.seq_idx[0]))


def moved(x: Tensor, rows: Tensor | None) -> Tensor:
    """Return x [1, T, ...] with each token where `rows` says; None: as it is."""
    return x if rows is None else torch.empty_like(x).index_copy(1, rows.long(), x)


def moved_back(x: Tensor, rows: Tensor | None) -> Tensor:
    """Return x [1, T, ...] with each token back from where `rows` says; None: as it is."""
    return x if rows is None else x.index_select(1, rows)
