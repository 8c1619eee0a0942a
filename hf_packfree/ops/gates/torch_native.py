"""The gates of the delta rule in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """See `hf_packfree.ops.gates.gates`."""
    return -A_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.sigmoid()
