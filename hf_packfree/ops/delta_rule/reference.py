"""The gated delta rule token by token: the definition that every backend is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_packfree.ops.chunked.l2norm import NORM_EPS
from hf_packfree.packing import PackedSequence


def recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, packed: PackedSequence
) -> Tensor:
    """Run each document of the row from a zero state; see
    `recurrent_gated_delta_rule_with_states`.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    zero = q.new_zeros(packed.num_segments, v.shape[2], q.shape[3], v.shape[3], dtype=dtype)
    return recurrent_gated_delta_rule_with_states(q, k, v, g, beta, zero, packed)[0]


def recurrent_gated_delta_rule_with_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    packed: PackedSequence,
) -> tuple[Tensor, Tensor]:
    """Run each document of the row from its initial state; clear rather than fast, differentiable
    by autograd.

    With S [K, V] the state, and for every token in turn (Yang et al., arXiv:2412.06464, eq. 10, S
    transposed):

        S <- exp(g) S;    S <- S + k (beta (v - k^T S));    o = q^T S

    Args and returns: as `hf_packfree.ops.delta_rule.gated_delta_rule_with_states`, computed in q's
    dtype if fp64, else fp32.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    groups = v.shape[2] // q.shape[2]
    query = (l2norm(q[0].to(dtype)) * q.shape[-1] ** -0.5).repeat_interleave(groups, 1)
    key = l2norm(k[0].to(dtype)).repeat_interleave(groups, 1)
    inputs = (query, key, v[0].to(dtype), g[0].to(dtype), beta[0].to(dtype))
    documents = zip(
        *(x.split(packed.lengths) for x in inputs), initial_state.to(dtype), strict=True
    )
    outputs, states = zip(*(_run_document(*document) for document in documents), strict=True)
    return torch.cat(outputs)[None].to(v.dtype), torch.stack(states)


def _run_document(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    outputs = []
    for q_t, k_t, v_t, g_t, beta_t in zip(q, k, v, g, beta, strict=True):
        state = state * g_t.exp()[:, None, None]
        read = torch.einsum("hk,hkv->hv", k_t, state)
        state = state + torch.einsum("hk,hv->hkv", k_t, beta_t[:, None] * (v_t - read))
        outputs.append(torch.einsum("hk,hkv->hv", q_t, state))
    return torch.stack(outputs), state


def l2norm(x: Tensor) -> Tensor:
    """Divide x by the L2 norm of its last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def rounded_l2norm(x: Tensor) -> Tensor:
    """`l2norm` computed in fp32, fp64 if x is, and rounded to x's dtype."""
    return l2norm(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)
