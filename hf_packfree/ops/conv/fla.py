"""The causal convolution of flash-linear-attention (Triton), with cu_seqlens."""

from __future__ import annotations

from torch import Tensor

from hf_packfree.ops.backend import Target
from hf_packfree.ops.fla import broken_fla, chunk_indices, needs_fla
from hf_packfree.packing import PackedSequence, uncompiled


def unusable(target: Target) -> str | None:
    """Return why it cannot run at `target`, or None."""
    return needs_fla(target) or broken_fla("fla.modules.convolution")


@uncompiled
def causal_conv1d(
    x: Tensor, weight: Tensor, packed: PackedSequence, bias: Tensor | None, silu: bool
) -> Tensor:
    """See `hf_packfree.ops.conv.causal_conv1d`."""
    from fla.modules.convolution import causal_conv1d as kernel

    out, _ = kernel(
        x,
        weight,
        bias,
        activation="silu" if silu else None,
        cu_seqlens=packed.cu_seqlens,
        **chunk_indices(packed),
    )
    return out  # type: ignore[no-any-return]
