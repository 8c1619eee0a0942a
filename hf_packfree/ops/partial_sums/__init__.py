"""What the programs of a Triton kernel have each summed, added up: a parameter's gradient, in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

_ELEMENTS, _ROWS = 4096, 512  # of a block; rows of it at most


def summed(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return parts [P, ...] in fp32 summed over P, in `dtype`: one kernel, where torch takes one to add and one to round."""
    from hf_packfree.ops.partial_sums.triton_kernels import total

    parts = parts.contiguous()
    out = parts.new_empty(parts.shape[1:], dtype=dtype)
    rows = min(_ROWS, 1 << (len(parts) - 1).bit_length())
    columns = _ELEMENTS // rows
    with torch.cuda.device_of(parts):
        total[(-(-out.numel() // columns),)](parts, out, len(parts), out.numel(), ROWS=rows, COLUMNS=columns, num_warps=8)
    return out


__all__ = ["summed"]
