"""What a chunk needs before any state is known: unit keys and queries, decays, and the triangular system.

Notation of one chunk and value head, tokens i and j of the chunk (Yang et al., arXiv:2412.06464 and 2406.06484):

    G_i = g_0 + ... + g_i            cumulative log decay
    L_ij = exp(G_i - G_j) k_i.k_j    for j < i
    P_ij = exp(G_i - G_j) q_i.k_j    for j <= i
    X = (I + diag(beta) L)^-1        the UT transform: with S the state before the chunk, the new values are
    N = X beta (v - exp(G) k S)      and then
    o = exp(G) q S + P N,    S' = exp(G_C) S + sum_j exp(G_C - G_j) k_j N_j^T

Shapes: R rows of one chunk and head each, C tokens of a chunk, K and V head sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_packfree.ops.delta_rule.recurrent import NORM_EPS
from hf_packfree.ops.delta_rule.triangular import unit_lower_inverse


class Keys(NamedTuple):
    """Unit keys and scaled unit queries, shared by the value heads that read them.

    Attributes:
        k, q: [R, C, K].
        k_norm, q_norm: [R, C, 1], what the raw ones were multiplied by.
        kk, qk: [R, C, C], products k_i.k_j and q_i.k_j.
    """

    k: Tensor
    q: Tensor
    k_norm: Tensor
    q_norm: Tensor
    kk: Tensor
    qk: Tensor


class Gates(NamedTuple):
    """Decay and write strength of one value head per key head.

    Attributes:
        beta: [R, C, 1].
        decay: [R, C, 1], exp(G).
        rest: [R, C, 1], exp(G_C - G), what a new value decays by until the end of the chunk.
        whole: [R, 1, 1], exp(G_C).
        pairs: [R, C, C], exp(G_i - G_j) for j <= i, else zero.
    """

    beta: Tensor
    decay: Tensor
    rest: Tensor
    whole: Tensor
    pairs: Tensor


class System(NamedTuple):
    """The chunk's equations, every factor multiplied in.

    Attributes:
        k_read: [R, C, K], -beta exp(G) k, what is taken off the values.
        q_read: [R, C, K], exp(G) q.
        k_write: [R, C, K], exp(G_C - G) k.
        values: [R, C, V], beta v.
        solve: [R, C, C], X.
        attend: [R, C, C], P.
        whole: [R, 1, 1], exp(G_C).
    """

    k_read: Tensor
    q_read: Tensor
    k_write: Tensor
    values: Tensor
    solve: Tensor
    attend: Tensor
    whole: Tensor


def make_keys(q: Tensor, k: Tensor, size: int) -> Keys:
    """Normalise q, k [R, C, K] in place, scale q by size ** -0.5 and multiply them out."""
    k_norm, q_norm = _inverse_norm(k), _inverse_norm(q) * size**-0.5
    k, q = k.mul_(k_norm), q.mul_(q_norm)
    return Keys(k, q, k_norm, q_norm, torch.bmm(k, k.mT), torch.bmm(q, k.mT))


def make_gates(g: Tensor, beta: Tensor) -> Gates:
    """Exponentiate the log decays g [R, C]; beta [R, C].

    G_i - G_j is summed from the decays between the two tokens alone: subtracting cumulative sums would lose what
    little decay there is after a strong one.
    """
    lower = torch.ones(g.shape[-1], g.shape[-1], dtype=g.dtype, device=g.device).tril()
    between = torch.bmm(g[:, None] * lower, lower.tril(-1).expand(len(g), -1, -1))
    pairs = between.exp_().mul_(lower)
    decay = g.cumsum(-1).exp_()[..., None]
    return Gates(beta[..., None], decay, pairs[:, -1, :, None].contiguous(), decay[:, -1:], pairs)


def make_system(keys: Keys, gates: Gates, v: Tensor) -> System:
    """Solve the chunk-local part for v [R, C, V], which is overwritten."""
    return System(
        k_read=keys.k * (gates.decay * -gates.beta),
        q_read=keys.q * gates.decay,
        k_write=keys.k * gates.rest,
        values=v.mul_(gates.beta),
        solve=unit_lower_inverse((keys.kk * gates.pairs).mul_(gates.beta)),
        attend=keys.qk * gates.pairs,
        whole=gates.whole,
    )


def _inverse_norm(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True).add_(NORM_EPS).rsqrt_()
