"""Kimi Delta Attention of flash-linear-attention: its Triton kernels."""

from __future__ import annotations

import sys
from functools import cache
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

from hf_packfree.ops.backend import Target
from hf_packfree.ops.fla_support import broken_fla, needs_fla, offsets, wide_keys
from hf_packfree.packing import PackedSequence, uncompiled


def unusable(target: Target) -> str | None:
    """Return why FLA's KDA cannot run at `target`, or None."""
    return wide_keys(target) or needs_fla(target) or broken_fla("fla.ops.kda")


@uncompiled
def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    packed: PackedSequence,
    qk_l2norm: bool,
) -> Tensor:
    """See `hf_packfree.ops.kda.kda`."""
    # a captured graph plans the chunks of each row, any other call on the host
    plan: dict[str, Any] = {"use_graph": True}
    if packed.bounded:
        _forget_buffers()
    else:
        plan = {"cu_seqlens_cpu": packed.cu_seqlens_cpu}
    out, _ = _kernel()(
        q,
        k,
        v,
        g.float(),
        beta,
        use_qk_l2norm_in_kernel=qk_l2norm,
        cu_seqlens=offsets(packed),
        **plan,
    )
    return out  # type: ignore[no-any-return]


def _forget_buffers() -> None:
    """Let the backward pass of a captured row allocate its buffers in the graph's memory: FLA makes
    them in the first backward pass of that length, before the capture, and keeps them as long as
    the process, 130 kB a token at Kimi Linear's width.
    """
    if (module := sys.modules.get("fla.ops.utils.graph")) is not None:
        module._BUFFERS.clear()


@cache
def _kernel() -> Any:
    """FLA's function without its dispatcher, which may choose a kernel without a backward."""
    from fla.ops.kda import chunk_kda

    return torch.compiler.disable(unwrap(chunk_kda))
