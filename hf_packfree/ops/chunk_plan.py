"""The plan of chunks that the delta rule's kernels read, computed on the host, so that nothing waits for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_packfree.packing import PackedSequence, chunk_plan

CHUNK = 64
"""Tokens of a chunk, in flash-linear-attention and in FlashQLA on Hopper."""


def chunk_indices(packed: PackedSequence, size: int = CHUNK) -> dict[str, Any]:
    """Return the keyword that spares flash-linear-attention its own planning."""
    return {"chunk_indices": packed.cached(plan_chunks, size)[1]}


def plan_chunks(packed: PackedSequence, size: int) -> tuple[Tensor, Tensor]:
    """Return, on the row's device, where each document's chunks of `size` tokens begin, and which one every chunk is.

    Returns:
        int32 [N+1], the number of each document's first chunk, and NC, the number of all.
        int32 [NC, 2], document and number within it.
    """
    firsts, document, number = chunk_plan(packed, size)
    device, plan = packed.cu_seqlens.device, (firsts, np.stack((document, number), 1))
    starts, chunks = (torch.from_numpy(part).to(device, non_blocking=True) for part in plan)
    return starts, chunks
