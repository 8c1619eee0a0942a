"""What a chunk needs before any state is known: unit keys and queries, decays, and the triangular
system.

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

from hf_packfree.ops.delta_rule.reference import NORM_EPS
from hf_packfree.ops.delta_rule.torch_chunked.scratch import Scratch

# side of the diagonal blocks that are eliminated row by row
_BASE = 8


class Units(NamedTuple):
    """Unit keys or scaled unit queries of a block, shared by the value heads that read them.

    Attributes:
        x: [R, C, K].
        norm: what the raw ones were multiplied by: [R, C, 1], or a number where they came with norm
            1.
        products: [R, C, C], x_i.k_j with k the unit keys.
    """

    x: Tensor
    norm: Tensor | float
    products: Tensor


class Gates(NamedTuple):
    """Decay and write strength of the value heads.

    Attributes:
        beta: [RG, C, 1].
        decay: [RG, C, 1], exp(G).
        rest: [RG, C, 1], exp(G_C - G), what a new value decays by until the end of the chunk.
        whole: [RG, 1, 1], exp(G_C).
        pairs: [RG, C, C], exp(G_i - G_j) for j <= i, else zero.
    """

    beta: Tensor
    decay: Tensor
    rest: Tensor
    whole: Tensor
    pairs: Tensor


class Update(NamedTuple):
    """How the state is carried over the chunk, every factor multiplied in.

    Attributes:
        read: [RG, C, K], -beta exp(G) k, what is taken off the values.
        write: [RG, C, K], exp(G_C - G) k.
        solve: [RG, C, C], X.
        whole: [RG, 1, 1], exp(G_C).
    """

    read: Tensor
    write: Tensor
    solve: Tensor
    whole: Tensor


class Output(NamedTuple):
    """How the output comes about: `read` [RG, C, K], exp(G) q; `attend` [RG, C, C], P."""

    read: Tensor
    attend: Tensor


def make_keys(k: Tensor, qk_l2norm: bool, space: Scratch, tag: str) -> Units:
    """Normalise k [R, C, K], in place, where `qk_l2norm`, and multiply it out; `tag` names the
    buffer.
    """
    norm = _normalise(k, 1.0, space) if qk_l2norm else 1.0
    return Units(k, norm, torch.bmm(k, k.mT, out=space(f"kk{tag}", *k.shape[:2], k.shape[1])))


def make_queries(q: Tensor, keys: Units, size: int, qk_l2norm: bool, space: Scratch) -> Units:
    """Normalise q [R, C, K], in place, where `qk_l2norm`, scale it by size ** -0.5 and multiply
    it with the keys.
    """
    norm: Tensor | float = size**-0.5
    if qk_l2norm:
        norm = _normalise(q, size**-0.5, space)
    else:
        q.mul_(norm)
    return Units(q, norm, torch.bmm(q, keys.x.mT, out=space.like("qk", keys.products)))


def make_gates(g: Tensor, beta: Tensor, space: Scratch, tag: str) -> Gates:
    """Exponentiate the log decays g [RG, C, 1]; beta [RG, C, 1]; `tag` names the buffer.

    G_i - G_j is summed from the decays between the two tokens alone: subtracting cumulative sums
    would lose what little decay there is after a strong one.
    """
    rows, chunk, _ = g.shape
    lower = torch.ones(chunk, chunk, dtype=g.dtype, device=g.device).tril()
    steps = torch.mul(g.mT, lower, out=space("temporary", rows, chunk, chunk))
    between = torch.bmm(
        steps, lower.tril(-1).expand(rows, -1, -1), out=space(f"pairs{tag}", rows, chunk, chunk)
    )
    pairs = between.exp_().mul_(lower)
    decay = g.cumsum(1).exp_()
    return Gates(beta, decay, pairs[:, -1, :, None].contiguous(), decay[:, -1:], pairs)


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


def _normalise(x: Tensor, scale: float, space: Scratch) -> Tensor:
    """Multiply x by scale / (its L2 norm), in place; return the factor."""
    square = torch.mul(x, x, out=space.like("temporary", x))
    norm = square.sum(-1, keepdim=True).add_(NORM_EPS).rsqrt_().mul_(scale)
    x.mul_(norm)
    return norm


def unit_lower_inverse(strict: Tensor, out: Tensor) -> Tensor:
    """Write (I + strict)^-1 to `out`, block by block, and return it.

    Args:
        strict: [R, C, C], of which only what is below the diagonal is read; C is `_BASE` times a
            power of two.

    Returns:
        `out` [R, C, C], lower triangular, exact zeros above the diagonal.

    Diagonal blocks are eliminated column by column; then [[A, 0], [B, D]]^-1 = [[A', 0], [-D' B A',
    D']] doubles their side until one is left. Unlike the Neumann product (I - S)(I + S^2)(I +
    S^4)..., whose powers of S grow beyond fp32 when keys repeat, every intermediate is a part of
    the answer or one product away from it.
    """
    side = strict.shape[-1]
    inverse = out.zero_()
    _diagonal_blocks(inverse).copy_(_eliminate(_diagonal_blocks(strict)))
    size = _BASE
    while size < side:
        for low in range(0, side, 2 * size):
            mid, high = low + size, low + 2 * size
            product = torch.bmm(strict[:, mid:high, low:mid], inverse[:, low:mid, low:mid])
            torch.neg(
                torch.bmm(inverse[:, mid:high, mid:high], product),
                out=inverse[:, mid:high, low:mid],
            )
        size *= 2
    return inverse


def _diagonal_blocks(x: Tensor) -> Tensor:
    """View the diagonal blocks of [R, C, C] as [b, b, R, C/b]: batch last, so that the
    elimination vectorises.
    """
    blocks: Tensor = x.view(len(x), -1, _BASE, x.shape[2] // _BASE, _BASE)
    return blocks.diagonal(dim1=1, dim2=3).permute(1, 2, 0, 3)


def _eliminate(strict: Tensor) -> Tensor:
    """Invert I + strict for strict [b, b, ...] by subtracting multiples of each row from the rows
    below it.

    Multiply and subtract are two calls because a fused one may round differently at the edge of a
    vector register, and values must not depend on a document's position in the row.
    """
    strict = strict.contiguous()
    inverse = torch.zeros_like(strict)
    inverse.diagonal(dim1=0, dim2=1).fill_(1)
    for row in range(len(strict) - 1):
        inverse[row + 1 :, : row + 1] -= (
            strict[row + 1 :, row, None] * inverse[None, row, : row + 1]
        )
    return inverse
