"""RMS norm and rotary embedding in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """See `hf_packfree.ops.norm_rope.norm_rope`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide) * torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + eps) * (1 + weight.to(wide))
    turning, still = y.split([cos.shape[-1], y.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cos[:, :, None].to(wide) + torch.cat((-second, first), dim=-1) * sin[:, :, None].to(wide)
    return torch.cat((turned, still), dim=-1).to(x.dtype)
