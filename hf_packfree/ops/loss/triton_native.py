"""The loss of a chunk of logits, and its gradient over the logits themselves, in Triton: two reads and a write."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_packfree.ops.launch import launch

_BLOCK = 8192  # logits of a program at a time


def softmax_gradient(logits: Tensor, targets: Tensor, scale: float | None) -> tuple[Tensor, Tensor | None]:
    """See `hf_packfree.ops.loss.softmax`; the gradient overwrites the logits, whose rows have no gaps.

    A target that is no word gives NaN.
    """
    from hf_packfree.ops.loss.triton_kernels import softmax_gradient

    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    wanted = scale is not None
    launch(
        softmax_gradient, (len(logits),), logits, targets, losses, scale if wanted else 1.0, logits.shape[1],
        GRADIENT=wanted, BLOCK=_BLOCK, num_warps=16,
    )
    return losses, logits if wanted else None


__all__ = ["softmax_gradient"]
