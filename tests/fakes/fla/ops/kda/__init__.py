"""The two entry points of Kimi Delta Attention, with the signatures and the checks of fla-core 0.6.0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.ops.gated_delta_rule.recurrence import unit
from fla.ops.kda.recurrence import run
from fla.ops.utils.index import check_chunk_indices, spans_of

__all__ = ["chunk_kda", "fused_recurrent_kda"]


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The kernel for training; keywords it does not know are swallowed, as by the real one."""
    if kwargs.get("chunk_size", 64) not in (32, 64):
        raise ValueError(f"chunk_size {kwargs['chunk_size']}: wanted 32 or 64")
    if initial_state is not None:
        assert initial_state.dtype == torch.float32, "initial_state must be in float32"
    gates = use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate
    if any(gates) or return_intermediate_states or use_graph or cp_context is not None:
        raise NotImplementedError("the stand-in has no gates, graphs or context parallelism")
    _check_shapes(q, k, v, g, beta)
    check_chunk_indices(None, cu_seqlens, cu_seqlens_cpu)
    return _call(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        state_v_first,
        cu_seqlens,
    )


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The kernel for decoding."""
    if use_gate_in_kernel or use_beta_sigmoid_in_kernel or allow_neg_eigval:
        raise NotImplementedError("the stand-in has no gates")
    return _call(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        state_v_first,
        cu_seqlens,
    )


def _call(
    q, k, v, g, beta, scale, initial_state, output_final_state, normalise, v_first, cu_seqlens
):
    if normalise:
        q, k = unit(q), unit(k)
    if v_first and initial_state is not None:
        initial_state = initial_state.transpose(-1, -2)
    out, final = run(q, k, v, g, beta, scale, initial_state, spans_of(q, cu_seqlens, initial_state))
    final = final.transpose(-1, -2) if v_first else final
    return out, final if output_final_state else None


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    rows, tokens, heads, size = q.shape
    value_heads = v.shape[2]
    assert q.shape == k.shape, f"q {tuple(q.shape)}, k {tuple(k.shape)}"
    assert size <= 256, f"keys of {size} channels, at most 256"
    assert value_heads % heads == 0, f"{value_heads} value heads, {heads} key heads"
    assert g.shape == (rows, tokens, value_heads, size), f"g {tuple(g.shape)}"
    assert beta.shape == (rows, tokens, value_heads), f"beta {tuple(beta.shape)}"
