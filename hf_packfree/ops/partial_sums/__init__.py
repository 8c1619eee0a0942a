"""What the programs of a Triton kernel have each summed, added up: a parameter's gradient, in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_packfree.ops.launch import launch

_ROWS, _COLUMNS = 512, 8  # of a block, whatever the number of programs: new row lengths compile nothing


def summed(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return parts [P, ...] in fp32 summed over P, in `dtype`: one kernel, where torch takes one to add and one to round."""
    from hf_packfree.ops.partial_sums.triton_kernels import total

    parts = parts.contiguous()
    out = parts.new_empty(parts.shape[1:], dtype=dtype)
    grid = (-(-out.numel() // _COLUMNS),)
    launch(total, grid, parts, out, parts.shape[0], out.numel(), ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8)
    return out


__all__ = ["summed"]
