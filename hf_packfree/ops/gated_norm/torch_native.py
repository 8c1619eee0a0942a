"""The gated RMS norm in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `hf_packfree.ops.gated_norm.gated_rms_norm`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    unit = x.to(wide) * torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + eps)
    return (unit * weight.to(wide) * F.silu(z.to(wide))).to(x.dtype)
