"""The sum over programs of a kernel's partial sums, in a fixed order: a parameter's gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_packfree.ops.launch import launch

_TILES = (512, 8), (32, 128)
"""(partials, columns) of a block, for few columns and for many. They do not depend on the number of
partials, so that new row lengths compile nothing.
"""
_MANY = 8192


def sum_partials(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Return partials [P, ...] in fp32 summed over P, in `dtype`: one kernel, where torch takes
    one to add and one to round.
    """
    from hf_packfree.ops.fused.kernels.linear import sum_partials

    partials = partials.contiguous()
    out = partials.new_empty(partials.shape[1:], dtype=dtype)
    rows, columns = _TILES[out.numel() >= _MANY]
    grid = (-(-out.numel() // columns),)
    launch(
        sum_partials,
        grid,
        partials,
        out,
        partials.shape[0],
        out.numel(),
        ROWS=rows,
        COLUMNS=columns,
        num_warps=8,
    )
    return out
