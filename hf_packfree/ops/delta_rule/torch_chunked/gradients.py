"""The chunk-local part of the backward pass: from the gradients of the system's factors to those of
the inputs.

With Z = X^T dN the chunk's own terms are dP = dO N^T and dL = -beta Z N^T. A log decay total G_i
scales row i of L and P, and its inverse scales column i, so that dG_i is what row i of dL L + dP P
sums to, less what column i does; and the same for the factors of the state. Notation in
`chunks.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_packfree.ops.chunked.l2norm import normalise_backward
from hf_packfree.ops.chunked.scan import Output, Update
from hf_packfree.ops.chunked.scratch import Scratch
from hf_packfree.ops.delta_rule.torch_chunked.chunks import Gates, Units, times


class KeyGradients(NamedTuple):
    """Gradients of the unit keys and queries, and of their products with the keys, summed over the
    value heads.
    """

    k: Tensor
    q: Tensor
    kk: Tensor
    qk: Tensor


def finish_values(
    keys: Units,
    queries: Units,
    gates: Gates,
    update: Update,
    output: Output,
    new: Tensor,
    z: Tensor,
    d_out: Tensor,
    kept: Tensor,
    v: Tensor,
    space: Scratch,
) -> tuple[KeyGradients, tuple[Tensor, Tensor, Tensor]]:
    """Compute the gradients of v, g and beta, and those of keys and queries summed over the value
    heads.

    Args:
        update, output: overwritten by `scan_gradients` with their gradients.
        new: [RG, C, V], N.
        z: [RG, C, V], overwritten.
        d_out: [RG, C, V].
        kept: [RG, 1, 1], the gradient of G_C through exp(G_C) S.
        v: [RG, C, V], overwritten.

    Returns:
        The `KeyGradients` for `finish_keys`, and the gradients of v [RG, C, V], g [RG, C] and beta
        [RG, C].
    """
    shapes = {"d_k": keys.x, "d_q": queries.x, "d_kk": keys.products, "d_qk": queries.products}
    total = KeyGradients(*(space.like(name, x).zero_() for name, x in shapes.items()))
    minus_beta = -gates.beta
    own = torch.bmm(z, new.mT, out=space.like("own", gates.pairs)).mul_(gates.pairs)
    _no_diagonal(own)
    local = times(keys.products, own, space, "local")
    row_k = local.sum(-1)
    _add_heads(total.kk, own, minus_beta)
    local.mul_(minus_beta)
    own = torch.bmm(d_out, new.mT, out=own).mul_(gates.pairs)
    _add_heads(total.qk, own)
    # the diagonal, exp(G_i - G_i) = 1, adds the same to row i and to column i; taken out, since
    # their difference is only rounding
    local.add_(_no_diagonal(times(queries.products, own, space, "own")))

    scale = gates.decay * minus_beta
    read_k, read_q, write_k = (
        times(x, d, space, "temporary").sum(-1)
        for d, x in ((update.read, keys.x), (output.read, queries.x), (update.write, keys.x))
    )
    _add_heads(total.k, update.read, scale)
    _add_heads(total.k, update.write, gates.rest)
    _add_heads(total.q, output.read, gates.decay)

    write_k *= gates.rest[..., 0]
    d_decay = (
        local.sum(-1)
        - local.sum(-2)
        + read_k * scale[..., 0]
        + read_q * gates.decay[..., 0]
        - write_k
    )
    d_decay[:, -1] += write_k.sum(-1) + kept[:, 0, 0]
    d_g = d_decay.flip(-1).cumsum(-1).flip(-1)
    d_beta = v.mul_(z).sum(-1) - row_k - gates.decay[..., 0] * read_k
    return total, (z.mul_(gates.beta), d_g, d_beta)


def finish_keys(
    keys: Units, queries: Units, total: KeyGradients, size: int, space: Scratch
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the raw queries and keys [R, C, K]; `total` is overwritten."""
    both = torch.add(total.kk, total.kk.mT, out=space.like("local", total.kk))
    d_k = total.k.baddbmm_(total.qk.mT, queries.x).baddbmm_(both, keys.x)
    d_q = total.q.baddbmm_(total.qk, keys.x)
    for d, x, norm, square in ((d_k, *keys[:2], 1), (d_q, *queries[:2], size)):
        normalise_backward(d, x, norm, square, space)
    return d_q, d_k


def _add_heads(total: Tensor, rows: Tensor, factor: Tensor | None = None) -> None:
    """Add to `total` [R, C, D] its G `rows` each, [RG, C, D], times `factor` [RG, C, 1]."""
    for head in range(len(rows) // len(total)):
        mine = slice(head, None, len(rows) // len(total))
        if factor is None:
            total.add_(rows[mine])
        else:
            total.addcmul_(rows[mine], factor[mine])


def _no_diagonal(x: Tensor) -> Tensor:
    x.diagonal(dim1=1, dim2=2).zero_()
    return x
