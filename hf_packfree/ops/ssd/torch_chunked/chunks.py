"""The chunks of a window: the parts that do not depend on a state, the scan over time steps, and
the outputs.

Notation of one chunk and head, tokens i and j of the chunk (Dao & Gu, arXiv:2405.21060, section 6):

    u_i = dt_i x_i                       what is written
    G_i = dt_0 A + ... + dt_i A          cumulative log decay
    P_ij = exp(G_i - G_j) C_i.B_j        for j <= i
    y = P u + exp(G) (C S) + D x         the output, S being the state before the chunk
    S' = exp(G_C) S + B^T (exp(G_C - G) u)

Decays multiply u and y, never B or C: the h heads of a block, all of one group, share one product
with each of those, with their values and states side by side.

Shapes: M chunks of a window, C tokens of a chunk, h heads of a block, R = M x h rows of one chunk
and head each; head size P, state size N.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hf_packfree.ops.chunked.decays import Decays
from hf_packfree.ops.chunked.layout import Step
from hf_packfree.ops.chunked.scratch import Scratch


class Chunks(NamedTuple):
    """The parts of a window's chunks that do not depend on a state.

    Attributes:
        heads: h.
        u: [R, C, P].
        dt: [R, C, 1].
        decays: decay factors of the R rows.
        B, C: [M, C, N].
        products: [M, C, C], C_i.B_j.
    """

    heads: int
    u: Tensor
    dt: Tensor
    decays: Decays
    B: Tensor
    C: Tensor
    products: Tensor

    def attend(self, space: Scratch) -> Tensor:
        """Return P [R, C, C]."""
        pairs = self.decays.pairs
        out = space.like("attend", pairs)
        torch.mul(self.products[:, None], self.by_head(pairs), out=self.by_head(out))
        return out

    def by_head(self, rows: Tensor) -> Tensor:
        """View rows [R, ...] as [M, h, ...]."""
        return rows.view(-1, self.heads, *rows.shape[1:])

    def heads_joined(self, rows: Tensor, factor: Tensor, name: str, space: Scratch) -> Tensor:
        """Return rows [R, C, P] times a factor [R, C, 1], with the heads in the last dimension, as
        the buffer `name` [M, C, h P].
        """
        out = space(name, len(self.B), self.B.shape[1], self.heads, rows.shape[2])
        torch.mul(self.by_head(rows), self.by_head(factor), out=out.transpose(1, 2))
        return out.flatten(2)

    def heads_apart(self, wide: Tensor) -> Tensor:
        """View [m, C, h P] as [m, h, C, P]."""
        return wide.view(*wide.shape[:2], self.heads, -1).transpose(1, 2)

    def whole(self) -> Tensor:
        """Return exp(G_C) as wide as the states, [M, 1, h P]."""
        whole = self.decays.whole.view(-1, 1, self.heads, 1)
        return whole.expand(-1, -1, -1, self.u.shape[2]).flatten(2)

    def writes(self, space: Scratch) -> Tensor:
        """Return exp(G_C - G) u, [M, C, h P]."""
        return self.heads_joined(self.u, self.decays.rest, "writes", space)


def opened(steps: tuple[Step, ...]) -> int:
    """Return how many chunks of a window are the first of their document, before which there is no
    state; they come first in the window.
    """
    return steps[0].docs if steps[0].opens else 0


def read_states(
    chunks: Chunks, steps: tuple[Step, ...], state: Tensor, space: Scratch
) -> Tensor | None:
    """Carry the state over the window's chunks, and return what each chunk reads of it.

    Args:
        steps: the window's.
        state: [documents, N, h P], the state before the first of `steps`; overwritten with the
            state after the last.

    Returns:
        C S [M - m, C, h P] of all chunks but the m that open a document; None where those are all.
    """
    first, writes, whole = opened(steps), chunks.writes(space), chunks.whole()
    read = space("read", len(writes) - first, *writes.shape[1:])
    parts = by_step(steps, chunks.B, chunks.C, writes, whole)
    for step, (B, C, write, decay), at in parts:
        on = slice(step.going_on)
        if step.opens:
            torch.bmm(B[on].mT, write[on], out=state[on])
            continue
        torch.bmm(C, state[: step.docs], out=read[at - first : at - first + step.docs])
        state[on].mul_(decay[on]).baddbmm_(B[on].mT, write[on])
    return read if len(read) else None


def keep_states(chunks: Chunks, steps: tuple[Step, ...], states: Tensor, space: Scratch) -> None:
    """Compute the state before every chunk.

    Args:
        steps: the window's.
        states: [at least M, N, h P]; the first rows are read, the later ones, to those of the step
            after `steps`, written. The rows of a step that opens the row are left alone: the state
            is zero there.
    """
    parts = by_step(steps, chunks.B, chunks.writes(space), chunks.whole())
    for step, (B, write, decay), at in parts:
        on = slice(step.going_on)
        after = states[at + step.docs :][on]
        if step.opens:
            torch.bmm(B[on].mT, write[on], out=after)
        else:
            before = states[at:][on]
            torch.mul(before, decay[on], out=after).baddbmm_(B[on].mT, write[on])


def outputs(chunks: Chunks, read: Tensor | None, x: Tensor, D: Tensor, space: Scratch) -> Tensor:
    """Return y [R, C, P].

    Args:
        read: C S, from `read_states`.
        x: [R, C, P].
        D: [h].
    """
    y = torch.bmm(chunks.attend(space), chunks.u, out=space.like("y", chunks.u))
    rows = chunks.by_head(y)
    if read is not None:
        decay = chunks.by_head(chunks.decays.decay)
        rows[-len(read) :].addcmul_(chunks.heads_apart(read), decay[-len(read) :])
    rows.addcmul_(chunks.by_head(x), D[:, None, None])
    return y


def by_step(steps: tuple[Step, ...], *parts: Tensor) -> Iterator[tuple[Step, list[Tensor], int]]:
    """Yield each step, its slices [docs, ...] of the window's tensors `parts` [M, ...], and the
    number of chunks before it.
    """
    at = 0
    for step in steps:
        yield step, [part[at : at + step.docs] for part in parts], at
        at += step.docs
