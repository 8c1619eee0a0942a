"""The gates of the delta rule in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from hf_packfree.ops.order import moved


def gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `hf_packfree.ops.gates.gates`."""
    a, b = moved(a, rows), moved(b, rows)
    return -A_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.sigmoid()
