"""The loss of a chunk of logits, and its gradient, in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SoftmaxGradient = Callable[[Tensor, Tensor, float | None], tuple[Tensor, Tensor | None]]
"""`softmax_gradient` of a backend."""


def softmax_gradient(logits: Tensor, targets: Tensor, scale: float | None) -> tuple[Tensor, Tensor | None]:
    """Return the losses of tokens and their gradient with respect to the logits, computed in fp32, or fp64 for such logits.

    Args:
        logits: [C, V], any floating dtype; may be overwritten.
        targets: int64 [C], -1 where there are none.
        scale: factor on the gradient; None: no gradient is wanted.

    Returns:
        [C] in that precision, zero where there is no target; (softmax(logits) - one-hot(target)) * scale [C, V] in the logits'
        dtype, zero there, too, or None.
    """
    log_softmax = torch.log_softmax(logits, 1, dtype=torch.promote_types(logits.dtype, torch.float32))
    has, column = targets >= 0, targets.clamp(min=0)[:, None]
    losses = -log_softmax.gather(1, column)[:, 0]
    if scale is None:
        return losses.masked_fill(~has, 0), None
    gradient = log_softmax.exp_()
    gradient.scatter_add_(1, column, gradient.new_full(column.shape, -1.0))
    if scale != 1:
        gradient.mul_(scale)
    if not bool(has.all()) if has.device.type == "cpu" else True:  # elsewhere, looking would take longer
        gradient.mul_(has[:, None])
    return losses.masked_fill(~has, 0), gradient.to(logits.dtype)


__all__ = ["SoftmaxGradient", "softmax_gradient"]
