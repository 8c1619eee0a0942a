"""The backward pass of a window's chunks, with the states before them known.

With dP = dy u^T * exp(G_i - G_j) and dS' the gradient of the state after the chunk:

    d(C B^T) = the sum over heads of dP
    du = P^T dy + exp(G_C - G) (B dS')
    dB = d(C B^T)^T C + (exp(G_C - G) u) dS'^T,   dC = d(C B^T) B + (exp(G) dy) S^T
    dS = exp(G_C) dS' + C^T (exp(G) dy)

A log decay g_i scales what tokens from i on read of S and of what those before i wrote, and what
these write to S'. So dg_i is the sum of these terms times their gradients; summing dG over later
tokens instead would lose digits, since most of it cancels. Notation in `chunks.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_packfree.ops.chunked.layout import Step
from hf_packfree.ops.chunked.scratch import Scratch
from hf_packfree.ops.ssd.torch_chunked.chunks import Chunks, by_step, opened


class WindowGradients(NamedTuple):
    """Gradients of a window: of u [R, C, P], of the log decays dt A [R, C], and of B and C [M, C,
    N], from the block's heads alone.
    """

    u: Tensor
    g: Tensor
    B: Tensor
    C: Tensor


class Carried(NamedTuple):
    """Results of the backward scan over time steps.

    Attributes:
        back: [M, C, h P], B dS'.
        kept: [M, h], S . dS', summed over the state.
    """

    back: Tensor
    kept: Tensor


def gradients(
    chunks: Chunks,
    steps: tuple[Step, ...],
    states: Tensor,
    d_y: Tensor,
    d_state: Tensor,
    space: Scratch,
) -> WindowGradients:
    """Run the gradient over a window.

    Args:
        steps: the window's.
        states: [M, N, h P], the state before each chunk.
        d_y: [R, C, P], zero in padding.
        d_state: [documents, N, h P], the gradient of the state after `steps`; overwritten with that
            of the state before them.
    """
    decays = chunks.decays
    d_attend = torch.bmm(d_y, chunks.u.mT, out=space.like("d_attend", decays.pairs))
    d_attend.mul_(decays.pairs)
    d_products = chunks.by_head(d_attend).sum(1)
    d_B, d_C = torch.bmm(d_products.mT, chunks.C), torch.bmm(d_products, chunks.B)
    d_u = torch.bmm(chunks.attend(space).mT, d_y, out=space.like("d_u", d_y))
    d_read = chunks.heads_joined(d_y, decays.decay, "d_read", space)
    back, kept = _scan(chunks, steps, states, d_read, d_state, d_B, d_C, space)
    d_g = _decay_gradients(chunks, steps, states, d_attend, d_y, back, kept, space)
    chunks.by_head(d_u).addcmul_(chunks.heads_apart(back), chunks.by_head(decays.rest))
    return WindowGradients(d_u, d_g, d_B, d_C)


def _scan(
    chunks: Chunks,
    steps: tuple[Step, ...],
    states: Tensor,
    d_read: Tensor,
    d_state: Tensor,
    d_B: Tensor,
    d_C: Tensor,
    space: Scratch,
) -> Carried:
    """Carry the gradient of the state from the last of `steps` to the first; add the parts that
    come through the states to `d_B` and `d_C`.
    """
    writes, whole = chunks.writes(space), chunks.whole()
    back = space.like("back", writes)
    kept = writes.new_zeros(len(writes), chunks.heads)
    split = (chunks.B, chunks.C, writes, whole, states, d_read, d_B, d_C, back, kept)
    for step, parts, _ in reversed(list(by_step(steps, *split))):
        B, C, write, decay, before, read, d_B_now, d_C_now, back_now, kept_now = parts
        on = slice(step.going_on)
        after = d_state[on]
        torch.bmm(B[on], after, out=back_now[on])
        back_now[step.going_on :].zero_()
        d_B_now[on].baddbmm_(write[on], after.mT)
        if step.opens:
            continue
        per_head = (before[on] * after).sum(1).unflatten(1, (chunks.heads, -1))
        kept_now[on] = per_head.sum(2)
        d_C_now.baddbmm_(read, before.mT)
        d_state[: step.docs].mul_(decay).baddbmm_(C.mT, read)
    return Carried(back, kept)


def _decay_gradients(
    chunks: Chunks,
    steps: tuple[Step, ...],
    states: Tensor,
    d_attend: Tensor,
    d_y: Tensor,
    back: Tensor,
    kept: Tensor,
    space: Scratch,
) -> Tensor:
    """Return the gradient of the log decays dt A, [R, C]; `d_attend` is overwritten."""
    decay, rest = (chunks.by_head(part[..., 0]) for part in chunks.decays[:2])
    own = d_attend.view_as(chunks.decays.pairs)
    chunks.by_head(own).mul_(chunks.products[:, None])
    # row i: what tokens from i on read, of which what those before i wrote decays by g_i
    later = torch.ones_like(own[0]).triu()
    spans = torch.bmm(later.expand_as(own), own, out=space.like("spans", own)).tril_(-1)
    wrote = (chunks.heads_apart(back) * chunks.by_head(chunks.u)).sum(-1).mul_(rest)
    total = chunks.by_head(spans.sum(-1))
    total[..., 1:] += wrote[..., :-1].cumsum(-1)
    total += (kept * decay[..., -1])[..., None]
    first = opened(steps)
    if first < len(states):
        read = torch.bmm(chunks.C[first:], states[first:], out=space("read", *back[first:].shape))
        read_gradient = (chunks.heads_apart(read) * chunks.by_head(d_y)[first:]).sum(-1)
        total[first:] += read_gradient.mul_(decay[first:]).flip(-1).cumsum(-1).flip(-1)
    return total.flatten(0, 1)
