"""Linear layers of one tensor in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear


def projections(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """See `hf_packfree.ops.projections.projections`."""
    return tuple(linear(x, weight) for weight in weights)
