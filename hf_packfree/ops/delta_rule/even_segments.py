"""Segments of bounded rows (CUDA graphs): each document is cut after every so many tokens, whatever
the other documents are, so that a plan of fixed size serves all rows of a bucket.
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from hf_packfree.ops.delta_rule.segments import (
    FOLD_COST,
    GAIN,
    SUMMARY_COST,
    Segments,
    plan_segments,
)
from hf_packfree.ops.fla_support import CHUNK
from hf_packfree.packing import PackedSequence, chunk_plan

# sizes of segments that are tried, in chunks
_SIZES = (4, 8, 16, 32, 64)
# time to write and read the states of as many segments as run in parallel, empty ones too, as a
# multiple of the time to walk a chunk; measured by `python -m tests.benchmarks.long_documents`
_STATES_COST = 4.0


def segments_of(packed: PackedSequence, parallel: int) -> Segments | None:
    """Return the segments of a row's documents; None: none is cut.

    Args:
        packed: the documents.
        parallel: how many segments run at once, each with all of its heads.
    """
    if not packed.bounded:
        return packed.cached(plan_segments, parallel)
    size = segment_size(packed.num_tokens, packed.num_segments, packed.max_seqlen, parallel)
    return None if size is None else Segments(*packed.cached(cut_evenly, size))


def segment_size(tokens: int, documents: int, longest: int, parallel: int) -> int | None:
    """Return after how many chunks documents are cut; None: nothing is expected to be gained.

    Args:
        tokens, documents: T and N of the row.
        longest: the bound of the documents' lengths, at most twice the longest of the row that the
            bucket was made for.
        parallel: how many segments run at once.
    """
    chunks, whole = tokens / CHUNK, longest / CHUNK
    # the longest document has 3/4 of the bound on average
    best, found = GAIN * max(chunks / parallel, 0.75 * whole), None
    for size in _SIZES:
        segments = chunks / size
        walk = size * ceil(segments / parallel)
        states = _STATES_COST * (segments + documents) / parallel
        time = (1 + SUMMARY_COST) * walk + FOLD_COST * whole / size + states
        if time < best:
            best, found = time, size
    return found


def cut_evenly(packed: PackedSequence, size: int) -> tuple[PackedSequence, Tensor, Tensor]:
    """Cut every document of a bounded row after each `size` chunks.

    Returns:
        The fields of `Segments`, with T // (size * CHUNK) + N segments, the last of which are
        empty.
    """
    offsets, device, tokens = packed.plan_offsets, packed.cu_seqlens.device, size * CHUNK
    firsts, document, number = chunk_plan(packed, tokens)
    # those that fill the plan up are in the last document, which is empty
    starts = torch.cat([offsets[document] + number * tokens, offsets[-1:]])
    row = torch.arange(packed.num_tokens, dtype=torch.int32, device=offsets.device)
    of_token = torch.searchsorted(starts[1:], row, right=True, out_int32=True)
    chunks = (starts.diff() + (CHUNK - 1)).div(CHUNK, rounding_mode="floor")
    # a segment's number, counted from the end of its document
    left = firsts[document + 1] - firsts[document] - 1 - number
    table = torch.stack((chunks * (left > 0), chunks * (number > 0)))
    record = PackedSequence(
        cu_seqlens=starts.to(device, non_blocking=True),
        cu_seqlens_cpu=starts,
        seq_idx=of_token.to(device, non_blocking=True)[None],
        max_seqlen=min(tokens, packed.max_seqlen),
        batch_shape=(1, packed.num_tokens),
        bounded=True,
    )
    return record, firsts.to(device, non_blocking=True), table.to(device, non_blocking=True)
