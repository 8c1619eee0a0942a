"""The loss of a chunk of logits, and its gradient: in PyTorch, and in Triton, where the gradient
overwrites the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_packfree.ops.launch import launch

SoftmaxGradient = Callable[[Tensor, Tensor, float | None], tuple[Tensor, Tensor | None]]
"""`softmax_gradient` of a backend."""
# logits of a program at a time
_BLOCK = 8192


def softmax_gradient(
    logits: Tensor, targets: Tensor, scale: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return the losses of tokens and their gradient with respect to the logits, computed in fp32,
    or fp64 for such logits.

    Args:
        logits: [C, V], any floating dtype; may be overwritten.
        targets: int64 [C], -1 where there are none.
        scale: factor on the gradient; None: no gradient is wanted.

    Returns:
        losses [C], fp32 or fp64; and (softmax(logits) - one-hot(target)) * scale [C, V] in the
        logits' dtype, or None. Both are zero where there is no target.
    """
    log_softmax = torch.log_softmax(
        logits, 1, dtype=torch.promote_types(logits.dtype, torch.float32)
    )
    has, column = targets >= 0, targets.clamp(min=0)[:, None]
    losses = -log_softmax.gather(1, column)[:, 0]
    if scale is None:
        return losses.masked_fill(~has, 0), None
    gradient = log_softmax.exp_()
    gradient.scatter_add_(1, column, gradient.new_full(column.shape, -1.0))
    if scale != 1:
        gradient.mul_(scale)
    # on a GPU, checking the targets would make the host wait
    if not bool(has.all()) if has.device.type == "cpu" else True:
        gradient.mul_(has[:, None])
    return losses.masked_fill(~has, 0), gradient.to(logits.dtype)


class LogitScaling(NamedTuple):
    """A head's steps after its last layer: z = after * tanh(before * logits) where `capped`, else
    before * logits.
    """

    before: float = 1.0
    capped: bool = False
    after: float = 1.0


def triton_softmax_gradient(
    logits: Tensor, targets: Tensor, scale: float | None, head: LogitScaling | None = None
) -> tuple[Tensor, Tensor | None]:
    """`softmax_gradient` in Triton, with two reads and one write of the logits, which must be
    contiguous: the gradient overwrites them. With a head, the losses are those of its z.

    A target outside of the vocabulary gives NaN.
    """
    from hf_packfree.ops.loss.triton_kernels import softmax_gradient

    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    wanted, done = scale is not None, head or LogitScaling()
    launch(
        softmax_gradient,
        (len(logits),),
        logits,
        targets,
        losses,
        scale if wanted else 1.0,
        done.before,
        done.after,
        logits.shape[1],
        GRADIENT=wanted,
        HEAD=head is not None,
        CAPPED=done.capped,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return losses, logits if wanted else None
