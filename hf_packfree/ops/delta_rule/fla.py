"""The gated delta rule of flash-linear-attention: its Triton kernels."""

from __future__ import annotations

from functools import cache
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

from hf_packfree.ops.backend import Target
from hf_packfree.ops.fla_support import (
    broken_fla,
    chunk_indices,
    needs_fla,
    offsets,
    wide_keys,
    wrong_on_hopper,
)
from hf_packfree.packing import PackedSequence, uncompiled


def unusable(target: Target) -> str | None:
    """Return why FLA's gated delta rule cannot run at `target`, or None."""
    reason = wide_keys(target) or needs_fla(target) or wrong_on_hopper(target)
    return reason or broken_fla("fla.ops.gated_delta_rule")


@uncompiled
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    packed: PackedSequence,
    qk_l2norm: bool,
) -> Tensor:
    """See `hf_packfree.ops.delta_rule.gated_delta_rule`."""
    out, _ = _kernel()(
        q,
        k,
        v,
        g.float(),
        beta,
        use_qk_l2norm_in_kernel=qk_l2norm,
        cu_seqlens=offsets(packed),
        **chunk_indices(packed),
    )
    return out  # type: ignore[no-any-return]


@uncompiled
def with_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    packed: PackedSequence,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    """See `hf_packfree.ops.delta_rule.gated_delta_rule_with_states`."""
    return _kernel()(  # type: ignore[no-any-return]
        q,
        k,
        v,
        g.float(),
        beta,
        initial_state=initial_state.contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=qk_l2norm,
        cu_seqlens=offsets(packed),
        **chunk_indices(packed),
    )


@cache
def _kernel() -> Any:
    """FLA's function without its dispatcher, which may call FlashQLA instead: that is a backend of
    its own here.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return torch.compiler.disable(unwrap(chunk_gated_delta_rule))
