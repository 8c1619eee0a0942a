"""The parts of a chunk that do not depend on a state, and their gradients.

Notation of one chunk and head, tokens i and j of the chunk, channels c of a key (Kimi Linear,
arXiv:2510.26692; the letters are those of the gated delta rule, `ops/delta_rule/torch_chunked`,
with G a vector):

    G_i = g_0 + ... + g_i                              cumulative log decay, [K]
    L_ij = sum_c k_ic k_jc exp(G_ic - G_jc)            for j < i
    P_ij = sum_c q_ic k_jc exp(G_ic - G_jc)            for j <= i
    X = (I + diag(beta) L)^-1                          the UT transform
    N = X beta (v - (exp(G) * k) S)                    the new values, S the state before the chunk
    o = (exp(G) * q) S + P N                           the output
    S' = diag(exp(G_C)) S + (exp(G_C - G) * k)^T N

Shapes: R rows of one chunk and head, C tokens of a chunk, K and V head sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_packfree.ops.chunked.l2norm import normalise, normalise_backward
from hf_packfree.ops.chunked.scan import Output, Update
from hf_packfree.ops.chunked.scratch import Scratch
from hf_packfree.ops.chunked.solve import unit_lower_inverse
from hf_packfree.ops.kda.torch_chunked.products import (
    decayed_products,
    decayed_products_backward,
)


class Unit(NamedTuple):
    """Unit keys or scaled unit queries: `x` [R, C, K], and the factor `norm` from the raw ones to
    x, [R, C, 1], or a number where they came with norm 1.
    """

    x: Tensor
    norm: Tensor | float


class Gates(NamedTuple):
    """Decay and write strength.

    Attributes:
        g: [R, C, K], log decay.
        beta: [R, C, 1].
        decay: [R, C, K], exp(G).
        rest: [R, C, K], exp(G_C - G).
    """

    g: Tensor
    beta: Tensor
    decay: Tensor
    rest: Tensor


class WindowChunks(NamedTuple):
    """The parts of a window's chunks that do not depend on a state, without queries and values.

    Attributes:
        k, gates: see above.
        products: [R, C, C], L.
        attend: [R, C, C], P.
        solve: [R, C, C], X.
    """

    k: Unit
    gates: Gates
    products: Tensor
    attend: Tensor
    solve: Tensor


def make_unit(x: Tensor, scale: float, qk_l2norm: bool, space: Scratch) -> Unit:
    """Normalise x [R, C, K] where `qk_l2norm`, and scale it, in place."""
    if qk_l2norm:
        return Unit(x, normalise(x, scale, space))
    return Unit(x.mul_(scale), scale)


def make_gates(g: Tensor, beta: Tensor, space: Scratch, tag: str) -> Gates:
    """Exponentiate the log decays g [R, C, K]; beta [R, C, 1]; `tag` names the buffers.

    G_C - G_i is summed from the decays after i: subtracting cumulative sums would lose what little
    decay there is after a strong one.
    """
    decay = torch.cumsum(g, 1, out=space.like(f"decay{tag}", g)).exp_()
    rest = space.like(f"rest{tag}", g)
    rest[:, -1] = 0
    rest[:, :-1] = g[:, 1:].flip(1).cumsum(1).flip(1)
    return Gates(g, beta, decay, rest.exp_())


def make_local(q: Unit, k: Unit, gates: Gates, space: Scratch, tag: str) -> WindowChunks:
    """Compute the decayed products L and P and invert the triangular system; `tag` names the
    buffers.
    """
    rows, chunk, _ = k.x.shape
    products, attend, solve = (
        space(f"{name}{tag}", rows, chunk, chunk) for name in ("kk", "attend", "solve")
    )
    decayed_products(gates.g, k.x, (k.x, q.x), (products, attend), space)
    attend.diagonal(dim1=1, dim2=2).copy_((q.x * k.x).sum(-1))
    strengths = torch.mul(products, gates.beta, out=space.like("temporary", products))
    return WindowChunks(k, gates, products, attend, unit_lower_inverse(strengths, out=solve))


def make_update(local: WindowChunks, space: Scratch) -> Update:
    """Multiply the gates into the keys."""
    k, gates = local.k.x, local.gates
    read = torch.mul(k, gates.decay, out=space.like("k_read", k)).mul_(-gates.beta)
    write = torch.mul(k, gates.rest, out=space.like("k_write", k))
    return Update(read, write, local.solve, gates.decay[:, -1, :, None].contiguous())


def make_output(q: Unit, local: WindowChunks, space: Scratch) -> Output:
    """Multiply the decays into the queries."""
    return Output(torch.mul(q.x, local.gates.decay, out=space.like("q_read", q.x)), local.attend)


def finish(
    q: Unit,
    local: WindowChunks,
    update: Update,
    output: Output,
    new: Tensor,
    z: Tensor,
    d_out: Tensor,
    kept: Tensor,
    v: Tensor,
    size: int,
    space: Scratch,
) -> tuple[Tensor, ...]:
    """Return the gradients of the raw q, k, v, g, beta; z, v, and the gradients in `update` and
    `output`, are overwritten.

    With Z = X^T dN the chunk's own terms are dP = dO N^T and dL = -beta Z N^T. The gradient of G_i
    adds, channel by channel, each product that exp(G_i) scales times its gradient, and subtracts
    each that exp(-G_i) scales times its gradient.

    Args:
        update, output: as `scan_gradients` left them: `read` and `write` hold their gradients.
        new, z: [R, C, V], N and Z.
        d_out: [R, C, V].
        kept: [R, K, 1], the gradient of G_C through exp(G_C) S.
        v: [R, C, V].
        size: K before it was widened.
    """
    k, (g, beta, decay, rest) = local.k.x, local.gates
    d_attend = torch.bmm(d_out, new.mT, out=space.like("d_attend", local.attend))
    d_products = torch.bmm(z, new.mT, out=space.like("d_products", local.products))
    own = (d_products * local.products).sum(-1)
    d_k, d_row, d_q = (space.like(name, k) for name in ("d_k", "d_row", "d_q"))
    d_outs = d_products.mul_(-beta), d_attend
    decayed_products_backward(g, k, (k, q.x), d_outs, d_k, (d_row, d_q), space)

    # from the gradients of the state's factors to those of keys and queries: times the decays
    read = update.read.mul_(decay)
    d_q.addcmul_(output.read, decay)
    d_row.addcmul_(read, -beta)
    write = update.write.mul_(rest)
    d_beta = v.mul_(z).sum(-1) - own - read.mul_(k).sum(-1)

    d_decay = torch.mul(q.x, d_q, out=space.like("d_decay", k))
    wrote = torch.mul(write, k, out=read)
    d_decay.addcmul_(k, d_row).addcmul_(k, d_k, value=-1).sub_(wrote)
    d_decay[:, -1].add_(wrote.sum(1)).add_(kept[..., 0])
    d_g = d_decay.flip(1).cumsum(1).flip(1)

    # the diagonal of P: a token reads its own write without decay
    along = d_attend.diagonal(dim1=1, dim2=2)[..., None]
    d_k.add_(d_row).add_(write).addcmul_(along, q.x)
    d_q.addcmul_(along, k)
    normalise_backward(d_k, k, local.k.norm, 1, space)
    normalise_backward(d_q, q.x, q.norm, size, space)
    return d_q, d_k, z.mul_(beta), d_g, d_beta
