"""Kimi Delta Attention token by token: the definition that every backend is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_packfree.ops.delta_rule.reference import l2norm
from hf_packfree.packing import PackedSequence


def recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, packed: PackedSequence
) -> Tensor:
    """Run each document of the row from a zero state; clear rather than fast, differentiable by
    autograd.

    With S [K, V] the state and g [K] a token's log decay, for every token in turn (Kimi Linear,
    arXiv:2510.26692, eq. 1):

        S <- diag(exp(g)) S;    S <- S + k (beta (v - k^T S));    o = q^T S

    Args and returns: as `hf_packfree.ops.kda.kda`, computed in q's dtype if fp64, else fp32.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    query, key = l2norm(q[0].to(dtype)) * q.shape[-1] ** -0.5, l2norm(k[0].to(dtype))
    inputs = (query, key, v[0].to(dtype), g[0].to(dtype), beta[0].to(dtype))
    documents = zip(*(x.split(packed.lengths) for x in inputs), strict=True)
    return torch.cat([_run_document(*document) for document in documents])[None].to(v.dtype)


def _run_document(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    state, outputs = v.new_zeros(*k.shape[1:], v.shape[-1]), []
    for q_t, k_t, v_t, g_t, beta_t in zip(q, k, v, g, beta, strict=True):
        state = state * g_t.exp()[:, :, None]
        read = torch.einsum("hk,hkv->hv", k_t, state)
        state = state + torch.einsum("hk,hv->hkv", k_t, beta_t[:, None] * (v_t - read))
        outputs.append(torch.einsum("hk,hkv->hv", q_t, state))
    return torch.stack(outputs)
