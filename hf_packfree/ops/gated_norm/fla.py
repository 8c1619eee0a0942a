"""The gated RMS norm of flash-linear-attention (Triton, tuned anew for every new size of row)."""

from __future__ import annotations

from torch import Tensor


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `hf_packfree.ops.gated_norm.gated_rms_norm`."""
    from fla.modules.fused_norm_gate import rms_norm_gated

    return rms_norm_gated(x, z, weight, None, "silu", eps=eps)  # type: ignore[no-any-return]
