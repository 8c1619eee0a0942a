"""The parts of a chunk that do not depend on a state: unit keys and queries, decays, and the
triangular system.

Notation of one chunk and value head, tokens i and j of the chunk (Yang et al., arXiv:2412.06464 and
2406.06484):

    G_i = g_0 + ... + g_i            cumulative log decay
    L_ij = exp(G_i - G_j) k_i.k_j    for j < i
    P_ij = exp(G_i - G_j) q_i.k_j    for j <= i
    X = (I + diag(beta) L)^-1        the UT transform
    N = X beta (v - exp(G) k S)      the new values, S being the state before the chunk
    o = exp(G) q S + P N             the output
    S' = exp(G_C) S + sum_j exp(G_C - G_j) k_j N_j^T

Shapes: R rows of one chunk and key head each, each read by G value heads: RG rows of one chunk and
value head each; C tokens of a chunk, K and V head sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_packfree.ops.chunked.decays import make_decays
from hf_packfree.ops.chunked.l2norm import normalise
from hf_packfree.ops.chunked.scan import Output, Update
from hf_packfree.ops.chunked.scratch import Scratch
from hf_packfree.ops.chunked.solve import unit_lower_inverse


class Units(NamedTuple):
    """Unit keys or scaled unit queries of a block, shared by the value heads that read them.

    Attributes:
        x: [R, C, K].
        norm: the factor from raw keys or queries to x: [R, C, 1], or a number where they came with
            norm 1.
        products: [R, C, C], x_i.k_j with k the unit keys.
    """

    x: Tensor
    norm: Tensor | float
    products: Tensor


class Gates(NamedTuple):
    """Decay and write strength of the value heads.

    Attributes:
        beta: [RG, C, 1].
        decay, rest, whole, pairs: see `hf_packfree.ops.chunked.decays.Decays`.
    """

    beta: Tensor
    decay: Tensor
    rest: Tensor
    whole: Tensor
    pairs: Tensor


def make_keys(k: Tensor, qk_l2norm: bool, space: Scratch, tag: str) -> Units:
    """Normalise k [R, C, K], in place, where `qk_l2norm`, and compute its products k_i.k_j; `tag`
    names the buffer.
    """
    norm = normalise(k, 1.0, space) if qk_l2norm else 1.0
    return Units(k, norm, torch.bmm(k, k.mT, out=space(f"kk{tag}", *k.shape[:2], k.shape[1])))


def make_queries(q: Tensor, keys: Units, size: int, qk_l2norm: bool, space: Scratch) -> Units:
    """Normalise q [R, C, K], in place, where `qk_l2norm`, scale it by size ** -0.5 and multiply
    it with the keys.
    """
    norm: Tensor | float = size**-0.5
    if qk_l2norm:
        norm = normalise(q, size**-0.5, space)
    else:
        q.mul_(norm)
    return Units(q, norm, torch.bmm(q, keys.x.mT, out=space.like("qk", keys.products)))


def make_gates(g: Tensor, beta: Tensor, space: Scratch, tag: str) -> Gates:
    """Exponentiate the log decays g [RG, C, 1]; beta [RG, C, 1]; `tag` names the buffer."""
    return Gates(beta, *make_decays(g, space, tag))


def make_solve(keys: Units, gates: Gates, space: Scratch, tag: str) -> Tensor:
    """Return X [RG, C, C]; `tag` names the buffer."""
    strengths = times(keys.products, gates.pairs, space, "temporary").mul_(gates.beta)
    return unit_lower_inverse(strengths, out=space.like(f"solve{tag}", strengths))


def make_update(keys: Units, gates: Gates, solve: Tensor, space: Scratch) -> Update:
    """Multiply the gates into the keys."""
    return Update(
        read=times(keys.x, gates.decay * -gates.beta, space, "k_read"),
        write=times(keys.x, gates.rest, space, "k_write"),
        solve=solve,
        whole=gates.whole,
    )


def make_output(queries: Units, gates: Gates, space: Scratch) -> Output:
    """Multiply the decays into the queries."""
    return Output(
        read=times(queries.x, gates.decay, space, "q_read"),
        attend=times(queries.products, gates.pairs, space, "attend"),
    )


def times(shared: Tensor, rows: Tensor, space: Scratch, name: str) -> Tensor:
    """Multiply `shared` [R, C, D] with its G `rows` each, [RG, C, D or 1], into the buffer
    `name` [RG, C, D].
    """
    out = space(name, len(rows), *shared.shape[1:])
    whole = len(shared), -1
    torch.mul(
        shared[:, None], rows.view(*whole, *rows.shape[1:]), out=out.view(*whole, *out.shape[1:])
    )
    return out
