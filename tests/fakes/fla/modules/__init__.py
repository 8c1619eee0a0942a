"""The modules that transformers 5.2 to 5.14 build in the place of their own: a gated norm, and for
OLMo Hybrid a convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["FusedRMSNormGated", "ShortConvolution"]


class FusedRMSNormGated(nn.Module):
    """Root mean square norm of x times the activation of a gate."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ("swish", "silu", "sigmoid"):
            raise ValueError(f"activation {activation!r}: wanted swish, silu or sigmoid")
        self.hidden_size, self.elementwise_affine, self.eps, self.activation = (
            hidden_size,
            elementwise_affine,
            eps,
            activation,
        )
        weight = (
            nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
            if elementwise_affine
            else None
        )
        self.register_parameter("weight", weight)
        self.register_parameter("bias", None)

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor:
        """Normalise x [..., hidden_size] and gate it with g of the same shape; fp32 inside,
        rounded once.
        """
        if residual is not None or prenorm:
            raise NotImplementedError("the stand-in takes no residual")
        out = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        out = out if self.weight is None else out * self.weight.float()
        gate = torch.sigmoid(g.float()) if self.activation == "sigmoid" else F.silu(g.float())
        return (out * gate).to(x.dtype)


class ShortConvolution(nn.Conv1d):
    """Causal depthwise convolution with its activation; built in releases in which packed rows of
    OLMo Hybrid are refused, and never run.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
    ) -> None:
        super().__init__(
            hidden_size,
            hidden_size,
            kernel_size,
            groups=hidden_size,
            bias=bias,
            padding=kernel_size - 1,
        )
        self.activation = activation

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Raise: nothing here says what the kernel does."""
        raise NotImplementedError("the stand-in is built alone")
