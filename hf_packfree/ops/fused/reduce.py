"""The sum of the partial sums that a kernel's programs leave: a parameter's gradient, in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_packfree.ops.launch import launch

_ROWS, _COLUMNS = 512, 8  # of a block, whatever the number of programs: new row lengths compile nothing


def sum_partials(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Return partials [P, ...] in fp32 summed over P, in `dtype`: one kernel, where torch takes one to add and one to round."""
    from hf_packfree.ops.fused.kernels.linear import sum_partials

    partials = partials.contiguous()
    out = partials.new_empty(partials.shape[1:], dtype=dtype)
    grid = (-(-out.numel() // _COLUMNS),)
    launch(sum_partials, grid, partials, out, partials.shape[0], out.numel(), ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8)
    return out


__all__ = ["sum_partials"]
