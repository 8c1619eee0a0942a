"""Mamba-2's SSD by flash-linear-attention's simple gated linear attention: its Triton kernels.

The two are the same recurrence under other names: q = C, k = B, v = dt x, g = dt A, a scale of one,
and then D x. B and C are repeated for the heads of their group, and dt x is rounded to x's dtype.
"""

from __future__ import annotations

from functools import cache
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

from hf_packfree.ops.backend import Target
from hf_packfree.ops.fla_support import broken_fla, needs_fla, refuses_on_hopper
from hf_packfree.packing import PackedSequence, uncompiled
from hf_packfree.versions import FLA_BACKWARD_WRONG_ON_HOPPER, VERSIONS


def unusable(target: Target) -> str | None:
    """Return why FLA's kernels cannot run SSD at `target`, or None."""
    if (reason := needs_fla(target)) is not None:
        return reason
    # FLA does not hand fp32 states, which this backward has, to TileLang's kernels
    if (reason := refuses_on_hopper(target)) is not None:
        newer = f"'triton>={FLA_BACKWARD_WRONG_ON_HOPPER[1]}' with a torch that takes it"
        return f"{reason}, with tilelang, too; {VERSIONS['mamba-ssm'].install}, or {newer}"
    return broken_fla("fla.ops.simple_gla")


@uncompiled
def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, packed: PackedSequence
) -> Tensor:
    """See `hf_packfree.ops.ssd.ssd`."""
    share, steps = x.shape[2] // B.shape[2], dt.float()
    query, key = (part.to(x.dtype).repeat_interleave(share, 2) for part in (C, B))
    out, _ = _kernel()(
        query,
        key,
        (x * steps[..., None]).to(x.dtype),
        steps * A.float(),
        scale=1.0,
        cu_seqlens=packed.cu_seqlens,
        cu_seqlens_cpu=packed.cu_seqlens_cpu,
    )
    return torch.addcmul(out, D.to(x.dtype)[:, None], x)


@cache
def _kernel() -> Any:
    """FLA's function without its dispatcher, as for the gated delta rule."""
    from fla.ops.simple_gla import chunk_simple_gla

    return torch.compiler.disable(unwrap(chunk_simple_gla))
