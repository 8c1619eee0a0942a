"""The gated RMS norm in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_packfree.ops.order import moved_back
from hf_packfree.ops.product import product


def gated_rms_norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, projection: Tensor | None = None, rows: Tensor | None = None
) -> Tensor:
    """See `hf_packfree.ops.gated_norm.gated_rms_norm`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x = moved_back(x, rows)
    unit = x.to(wide) * torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + eps)
    normed = (unit * weight.to(wide) * F.silu(z.to(wide))).to(x.dtype)
    return normed if projection is None else product(normed.flatten(-2), projection)
