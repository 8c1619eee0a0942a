"""The gated RMS norm of flash-linear-attention (Triton, tuned anew for every new size of row)."""

from __future__ import annotations

from torch import Tensor

from hf_packfree.ops.backend import Site
from hf_packfree.ops.fla import broken_fla, needs_fla


def unusable(site: Site) -> str | None:
    """Return why it cannot run at `site`, or None."""
    return needs_fla(site) or broken_fla("fla.modules.fused_norm_gate")


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `hf_packfree.ops.gated_norm.gated_rms_norm`."""
    from fla.modules.fused_norm_gate import rms_norm_gated

    return rms_norm_gated(x, z, weight, None, "silu", eps=eps)  # type: ignore[no-any-return]
