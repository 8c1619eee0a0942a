"""The gated RMS norm of flash-linear-attention (Triton, tuned anew for every new size of row)."""

from __future__ import annotations

from torch import Tensor

from hf_packfree.ops.backend import Site
from hf_packfree.ops.fla import broken_fla, needs_fla
from hf_packfree.ops.order import moved_back
from hf_packfree.ops.product import product


def unusable(site: Site) -> str | None:
    """Return why it cannot run at `site`, or None."""
    return needs_fla(site) or broken_fla("fla.modules.fused_norm_gate")


def gated_rms_norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, projection: Tensor | None = None, rows: Tensor | None = None
) -> Tensor:
    """See `hf_packfree.ops.gated_norm.gated_rms_norm`."""
    from fla.modules.fused_norm_gate import rms_norm_gated

    normed: Tensor = rms_norm_gated(moved_back(x, rows), z, weight, None, "silu", eps=eps)
    return normed if projection is None else product(normed.flatten(-2), projection)
