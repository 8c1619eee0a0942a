"""The T x T mask of a packed row, for attention that takes nothing better (eager)."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_packfree.packing import PackedSequence


def additive_block_mask(packed: PackedSequence, dtype: torch.dtype) -> Tensor:
    """Return [1, 1, T, T] in `dtype`: 0 where a token may look, the dtype's minimum elsewhere."""
    number = packed.seq_idx[0]
    allowed = (number[:, None] == number[None, :]).tril()
    mask = torch.zeros(allowed.shape, dtype=dtype, device=number.device)
    return mask.masked_fill(~allowed, torch.finfo(dtype).min)[None, None]
