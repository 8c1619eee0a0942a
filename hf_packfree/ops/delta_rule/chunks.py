"""What a chunk needs before any state is known: unit keys and queries, decays, and the triangular system.

Notation of one chunk and value head, tokens i and j of the chunk (Yang et al., arXiv:2412.06464 and 2406.06484):

    G_i = g_0 + ... + g_i            cumulative log decay
    L_ij = exp(G_i - G_j) k_i.k_j    for j < i
    P_ij = exp(G_i - G_j) q_i.k_j    for j <= i
    X = (I + diag(beta) L)^-1        the UT transform: with S the state before the chunk, the new values are
    N = X beta (v - exp(G) k S)      and then
    o = exp(G) q S + P N,    S' = exp(G_C) S + sum_j exp(G_C - G_j) k_j N_j^T

Shapes: T tokens, M chunks, C tokens of a chunk, R = M x (heads of the block) rows, K and V head sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_packfree.ops.delta_rule.layout import ChunkLayout
from hf_packfree.ops.delta_rule.recurrent import NORM_EPS
from hf_packfree.ops.delta_rule.triangular import unit_lower_inverse


class Keys(NamedTuple):
    """A block of key heads, shared by the value heads that read them.

    Attributes:
        units: [R, 2C, K], unit keys above unit queries scaled by K ** -0.5.
        norms: [R, 2C, 1], what the raw keys and queries were multiplied by.
        products: [R, 2C, C], `units` times the keys transposed.
    """

    units: Tensor
    norms: Tensor
    products: Tensor


class Gates(NamedTuple):
    """Decay and write strength of one value head per key head of the block.

    Attributes:
        beta: [R, C, 1].
        reading: [R, 2C, 1], what keys (-beta exp(G)) and queries (exp(G)) read from the state is scaled by.
        writing: [R, C, 1], exp(G_C - G), what a new value decays by until the end of the chunk.
        chunk: [R, 1, 1], exp(G_C).
        pairs: [R, 2, C, C], exp(G_i - G_j) for j < i above the same for j <= i, else zero.
    """

    beta: Tensor
    reading: Tensor
    writing: Tensor
    chunk: Tensor
    pairs: Tensor


class System(NamedTuple):
    """`solve` [R, C, C]: X; `attend` [R, C, C]: P; `values` [R, C, V]: beta v."""

    solve: Tensor
    attend: Tensor
    values: Tensor


def make_keys(q: Tensor, k: Tensor, size: int, layout: ChunkLayout, dtype: torch.dtype) -> Keys:
    """Normalise q, k [T, h, K] (rsqrt of the sum of squares + NORM_EPS), scale q by size ** -0.5, multiply them out."""
    (_, heads, width), chunk = q.shape, layout.chunk
    units = q.new_empty(layout.num_chunks, heads, 2, chunk, width, dtype=dtype)
    norms = q.new_empty(layout.num_chunks, heads, 2, chunk, 1, dtype=dtype)
    for half, (source, scale) in enumerate(((k, 1.0), (q, size**-0.5))):
        laid = layout.take(source).to(dtype).transpose(1, 2)
        norms[:, :, half] = torch.rsqrt(laid.square().sum(-1, keepdim=True) + NORM_EPS) * scale
        torch.mul(laid, norms[:, :, half], out=units[:, :, half])
    rows = units.view(-1, 2 * chunk, width)
    return Keys(rows, norms.view(-1, 2 * chunk, 1), torch.bmm(rows, rows[:, :chunk].mT))


def make_gates(g: Tensor, beta: Tensor) -> Gates:
    """Exponentiate the log decays g [R, C]; beta [R, C].

    G_i - G_j is summed from the decays between the two tokens alone: subtracting cumulative sums would lose what
    little decay there is after a strong one.
    """
    chunk = g.shape[-1]
    lower = torch.ones(chunk, chunk, dtype=g.dtype, device=g.device).tril()
    strict = lower.tril(-1)
    between = torch.bmm(g[:, None] * lower, strict.expand(len(g), -1, -1)).exp_()
    decay = g.cumsum(-1).exp_()[..., None]
    return Gates(
        beta=beta[..., None],
        reading=torch.cat((-decay * beta[..., None], decay), 1),
        writing=between[:, -1, :, None].contiguous(),
        chunk=decay[:, -1:],
        pairs=between[:, None] * torch.stack((strict, lower)),
    )


def make_system(keys: Keys, gates: Gates, values: Tensor) -> System:
    """Solve the chunk-local part for `values` [M, C, h, V], the laid-out v."""
    local = gates.pairs * keys.products.view_as(gates.pairs)
    by_head = values.transpose(1, 2)
    scaled = (by_head * gates.beta.view(*by_head.shape[:3], 1)).flatten(0, 1)
    return System(unit_lower_inverse(local[:, 0] * gates.beta), local[:, 1], scaled)
