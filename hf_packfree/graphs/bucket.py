"""Buckets of rows: tokens and documents up to a bound, so that all rows of a bucket have tensors of
the same sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_packfree.packing import PackedSequence

STEPS = 16
"""Buckets from one power of two to the next: at most 1/16 of a row is padding."""
FINEST = 16
"""Tokens from one bucket to the next, at least."""
FEWEST_DOCUMENTS = 16
"""Documents of a bucket, at least."""


@dataclass(frozen=True, order=True)
class Bucket:
    """Bounds of rows.

    Attributes:
        tokens: of the row, padding included.
        documents: segments of the row, its padding and empty ones at its end included.
        longest: of a document.
    """

    tokens: int
    documents: int
    longest: int

    def holds(self, packed: PackedSequence) -> bool:
        """Whether the row fits, and is not much shorter."""
        spare = self.tokens - packed.num_tokens
        return (
            0 <= spare <= max(FINEST, self.tokens // STEPS)
            and packed.num_segments + 2 <= self.documents
            and max(packed.max_seqlen, spare) <= self.longest
        )


def bucket_of(packed: PackedSequence) -> Bucket:
    """Return the bucket of a row: its sizes, rounded up."""
    tokens = packed.num_tokens
    step = max(FINEST, (1 << (tokens - 1).bit_length()) // (2 * STEPS))
    tokens = -(-tokens // step) * step
    # the padding counts as one document, and plans are filled up with empty ones, at least one
    documents = max(FEWEST_DOCUMENTS, 1 << (packed.num_segments + 1).bit_length())
    longest = min(tokens, 1 << (max(packed.max_seqlen, step) - 1).bit_length())
    return Bucket(tokens, documents, longest)


def in_bucket(packed: PackedSequence, bucket: Bucket) -> PackedSequence:
    """Return the record of the row, followed by a document of padding and by empty documents, so
    that N and T are the bucket's.

    Its plans have the sizes of `chunk_plan`'s bounds.
    """
    device, spare = packed.seq_idx.device, bucket.tokens - packed.num_tokens
    ends = torch.full((bucket.documents - packed.num_segments,), bucket.tokens, dtype=torch.int32)
    offsets = torch.cat([packed.cu_seqlens_cpu, ends])
    seq_idx = packed.seq_idx
    if spare:
        of_padding = seq_idx.new_full((1, spare), packed.num_segments)
        seq_idx = torch.cat([seq_idx, of_padding], 1)
    return replace(
        packed,
        cu_seqlens=offsets.to(device, non_blocking=True),
        cu_seqlens_cpu=offsets,
        seq_idx=seq_idx,
        max_seqlen=bucket.longest,
        batch_shape=(1, bucket.tokens),
        indices=None,
        padding_segments=(),
        plain=False,
        bounded=True,
        _memo={},
    )


def lengthened(row: Tensor, bucket: Bucket, dim: int) -> Tensor:
    """Return a tensor of the row with zeros for the bucket's padding along `dim`."""
    spare = bucket.tokens - row.shape[dim]
    if not spare:
        return row
    sizes = [*row.shape]
    sizes[dim] = spare
    return torch.cat([row, row.new_zeros(sizes)], dim)
