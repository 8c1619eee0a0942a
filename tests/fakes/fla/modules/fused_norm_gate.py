"""The gated norm as a function."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """Normalise x [..., D] and gate it with g of the same shape; fp32 inside, rounded once."""
    if residual is not None or prenorm:
        raise NotImplementedError("the stand-in takes no residual")
    out = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    out = out if weight is None else out * weight.float()
    out = out if bias is None else out + bias.float()
    gate = torch.sigmoid(g.float()) if activation == "sigmoid" else F.silu(g.float())
    return (out * gate).to(x.dtype)
