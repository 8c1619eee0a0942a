"""The two entry points, with the signatures and the checks of fla-core 0.6.0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.ops.gated_delta_rule.recurrence import log_decay, run, unit
from fla.ops.utils.index import check_chunk_indices, spans_of

__all__ = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The kernel for training; keywords it does not know are swallowed, as by the real one."""
    if "head_first" in kwargs:
        raise DeprecationWarning("head_first is gone: inputs are [B, T, H, ...]")
    if kwargs.get("chunk_size", 64) not in (16, 32, 64):
        raise ValueError(f"chunk_size {kwargs['chunk_size']}: wanted 16, 32 or 64")
    if cp_context is not None:
        raise NotImplementedError("the stand-in has no context parallelism")
    _check_heads(q, k, v)
    check_chunk_indices(chunk_indices, cu_seqlens, cu_seqlens_cpu)
    beta = _strength(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if kwargs.get("use_gate_in_kernel", False):
        assert kwargs.get("A_log") is not None, "use_gate_in_kernel needs A_log"
        g = log_decay(g, kwargs["A_log"], kwargs.get("dt_bias"))
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


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The kernel for decoding."""
    if gk is not None or gv is not None:
        raise NotImplementedError("the stand-in has no decay per channel")
    beta = _strength(
        torch.ones_like(v[..., 0]) if beta is None else beta,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )
    if use_gate_in_kernel:
        if A_log is None or g is None:
            raise ValueError("use_gate_in_kernel needs A_log and g")
        g = log_decay(g, A_log, dt_bias)
    g = torch.zeros_like(beta) if g is None else g
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


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads, k {k.shape[2]}")
    if v.shape[2] % q.shape[2]:
        raise ValueError(f"{v.shape[2]} value heads are no multiple of {q.shape[2]} key heads")


def _strength(beta: Tensor, raw: bool, allow_neg_eigval: bool) -> Tensor:
    if allow_neg_eigval and not raw:
        raise ValueError("allow_neg_eigval needs use_beta_sigmoid_in_kernel")
    return beta.float().sigmoid() * (2.0 if allow_neg_eigval else 1.0) if raw else beta
