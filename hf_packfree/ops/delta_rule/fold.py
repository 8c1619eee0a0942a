"""The states that segments begin with, from what each does to a state: S' = M S + B, one segment after the other.

Shapes: N documents, S segments, HV value heads, K and V head sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_packfree.ops.backend import block_width
from hf_packfree.ops.launch import launch

_COLUMNS = 32  # of a state, in one program: a step of it is a few microseconds
_WARPS = 8


def fold(
    transition: Tensor, addend: Tensor, given: Tensor | None, firsts: Tensor, *, reverse: bool = False, backend: str = "auto"
) -> Tensor:
    """Return the state before every segment; or, in reverse, the gradient of the state after it, whose step is M^T S + B.

    Args:
        transition: M [S, HV, K, K], fp32 or fp64.
        addend: B [S, HV, K, V], of the same dtype.
        given: [N, HV, K, V], what every document begins with, or in reverse ends with; None: zero.
        firsts: int32 [N+1], each document's first segment, and S.
        reverse: from each document's last segment to its first.
        backend: "triton" or "torch"; "auto": Triton on CUDA.

    Returns:
        [S, HV, K, V] of that dtype.
    """
    if backend == "triton" or (backend == "auto" and addend.is_cuda and addend.dtype == torch.float32):
        return _fold_triton(transition, addend, given, firsts, reverse)
    out = torch.empty_like(addend)
    offsets = firsts.tolist()
    for document, (first, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        state = torch.zeros_like(addend[0]) if given is None else given[document].to(addend.dtype)
        for segment in reversed(range(first, end)) if reverse else range(first, end):
            out[segment] = state
            state = (transition[segment].mT if reverse else transition[segment]) @ state + addend[segment]
    return out


def _fold_triton(transition: Tensor, addend: Tensor, given: Tensor | None, firsts: Tensor, reverse: bool) -> Tensor:
    from hf_packfree.ops.delta_rule.triton_kernels import fold_states

    transition, addend = transition.contiguous(), addend.contiguous()
    given = given if given is None else given.to(addend.dtype).contiguous()
    out = torch.empty_like(addend)
    _, heads, keys, values = addend.shape
    grid = len(firsts) - 1, heads, -(-values // _COLUMNS)
    launch(
        fold_states, grid, transition, addend, given, firsts, out,
        HEADS=heads, K=keys, V=values, BLOCK_K=block_width(max(keys, 16)), COLUMNS=_COLUMNS, REVERSE=reverse, num_warps=_WARPS,
    )
    return out


__all__ = ["fold"]
