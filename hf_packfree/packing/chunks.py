"""The plan by which chunked kernels walk a row: chunks of a fixed size, none over two segments."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_packfree.packing.record import PackedSequence


def chunk_plan(packed: PackedSequence, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut each segment into chunks of `size` tokens, the last one maybe shorter; P chunks in all;
    int32, where the record's `plan_offsets` are.

    Returns:
        offsets: [N+1], each segment's first chunk, and the number of chunks.
        segment, number: [P], the segment of each chunk, and the chunk's number in its segment.
            Where the record is `bounded`, P is T // size + N, and surplus chunks belong to the last
            segment, which is empty.
    """
    counts = (packed.plan_offsets.diff() + (size - 1)).div(size, rounding_mode="floor")
    offsets = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    last = packed.num_segments - 1
    # the number of chunks would be known on the device alone
    chunks = packed.num_tokens // size + last + 1 if packed.bounded else int(offsets[-1])
    number = torch.arange(chunks, dtype=torch.int32, device=offsets.device)
    segment = torch.searchsorted(offsets[1:], number, right=True, out_int32=True).clamp_(max=last)
    number = torch.where(number < offsets[-1], number - offsets[segment], 0)
    return offsets, segment, number
