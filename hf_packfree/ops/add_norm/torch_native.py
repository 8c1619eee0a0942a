"""Residual sum and RMS norm in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def add_norm(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `hf_packfree.ops.add_norm.add_norm`."""
    total = x if branch is None else x + branch
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (unit * (1 + weight.to(wide.dtype))).to(total.dtype), total
