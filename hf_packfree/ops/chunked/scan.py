"""The scans over time steps: forward over the chunks of all documents at once, and its gradient
backward.

Rows are sorted by time step, those of documents that go on first, see `layout.py`; notation in
`ops/delta_rule/torch_chunked/chunks.py`. Everything that does not depend on the previous step is
computed for all steps at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_packfree.ops.chunked.layout import Step


class Update(NamedTuple):
    """The factors that carry the state over a chunk, decays and beta multiplied in.

    Attributes:
        read: [RG, C, K], -beta exp(G) k: its product with the state is added to the values.
        write: [RG, C, K], exp(G_C - G) k.
        solve: [RG, C, C], X.
        whole: [RG, 1, 1], exp(G_C); [RG, K, 1] where every channel of a key has its own decay.
    """

    read: Tensor
    write: Tensor
    solve: Tensor
    whole: Tensor


class Output(NamedTuple):
    """The factors of the output: `read` [RG, C, K], exp(G) q; `attend` [RG, C, C], P."""

    read: Tensor
    attend: Tensor


def scan_outputs(
    update: Update,
    output: Output,
    values: Tensor,
    steps: Sequence[Step],
    heads: int,
    state: Tensor,
    out: Tensor,
) -> None:
    """Write o [RG, C, V] to `out`.

    Args:
        update, output: of RG rows.
        values: [RG, C, V], beta v, overwritten.
        steps: the time steps that the rows belong to.
        heads: rows per chunk.
        state: [rows of the very first step, K, V], the state before the first of `steps`;
            overwritten with the state after the last.
        out: [RG, C, V].
    """
    sizes = [step.docs * heads for step in steps]
    views = zip(steps, *(x.split(sizes) for x in (out, values, *update, *output)), strict=True)
    for step, out_now, values_now, k_read, k_write, solve, whole, q_read, attend in views:
        before = state[: len(out_now)]
        if step.opens:
            new = torch.bmm(solve, values_now)
            torch.bmm(attend, new, out=out_now)
        else:
            new = torch.bmm(solve, values_now.baddbmm_(k_read, before))
            torch.bmm(q_read, before, out=out_now).baddbmm_(attend, new)
        on = step.going_on * heads
        if step.opens:
            torch.bmm(k_write[:on].mT, new[:on], out=before[:on])
        else:
            before[:on].mul_(whole[:on]).baddbmm_(k_write[:on].mT, new[:on])


def scan_states(
    update: Update, values: Tensor, steps: Sequence[Step], heads: int, states: Tensor, new: Tensor
) -> None:
    """Compute the state before every chunk, and the new values.

    Args:
        update: of RG rows.
        values: [RG, C, V], beta v, overwritten.
        steps: as above.
        heads: as above.
        states: [at least RG, K, V]; the first rows are read, the later ones, to those of the step
            after `steps`, written. The rows of a step that opens the row are left alone: the state
            is zero there.
        new: [RG, C, V], N is written here.
    """
    sizes = [step.docs * heads for step in steps]
    views = zip(steps, *(x.split(sizes) for x in (new, values, *update)), strict=True)
    for step, new_now, values_now, k_read, k_write, solve, whole in views:
        on = step.going_on * heads
        before, states = states[: len(solve)], states[len(solve) :]
        if step.opens:
            torch.bmm(solve, values_now, out=new_now)
            torch.bmm(k_write[:on].mT, new_now[:on], out=states[:on])
        else:
            torch.bmm(solve, values_now.baddbmm_(k_read, before), out=new_now)
            torch.mul(before[:on], whole[:on], out=states[:on]).baddbmm_(
                k_write[:on].mT, new_now[:on]
            )


def scan_gradients(
    update: Update,
    output: Output,
    steps: Sequence[Step],
    heads: int,
    states: Tensor,
    new: Tensor,
    d_out: Tensor,
    d_state: Tensor,
    z: Tensor,
    product: Tensor,
) -> Tensor:
    """Run the gradient from the last of `steps` to the first, with the states and values that
    `scan_states` computed.

    Args:
        update, output: of RG rows; reads and writes are overwritten by their gradients.
        steps: as above.
        heads: as above.
        states: [RG, K, V].
        new, d_out: [RG, C, V].
        d_state: [rows of the very first step, K, V], the gradient of the state after `steps`;
            overwritten with that of the state before them.
        z: [RG, C, V], Z = X^T dN is written here.
        product: like d_state, overwritten.

    Returns:
        The gradient of G_C through exp(G_C) S, shaped like `whole`.
    """
    kept = torch.zeros_like(update.whole)
    shared = (1, 2) if kept.shape[1] == 1 else (2,)
    d_new = torch.bmm(output.attend.mT, d_out)
    sizes = [step.docs * heads for step in steps]
    split = (new, states, d_new, d_out, z, kept, *update, output.read)
    views = zip(steps, *(x.split(sizes) for x in split), strict=True)
    for step, new_now, before, d_new_now, d_out_now, z_now, kept_now, *factors in reversed(
        list(views)
    ):
        k_read, k_write, solve, whole, q_read = factors
        on = step.going_on * heads
        after = d_state[:on]
        if on:
            d_new_now[:on].baddbmm_(k_write[:on], after)
            torch.bmm(new_now[:on], after.mT, out=k_write[:on])
        k_write[on:].zero_()
        torch.bmm(solve.mT, d_new_now, out=z_now)
        if step.opens:
            k_read.zero_()
            q_read.zero_()
            continue
        torch.mul(before[:on], after, out=product[:on])
        torch.sum(product[:on], shared, keepdim=True, out=kept_now[:on])
        d_before = d_state[: len(z_now)].mul_(whole)
        d_before.baddbmm_(k_read.mT, z_now).baddbmm_(q_read.mT, d_out_now)
        torch.bmm(z_now, before.mT, out=k_read)
        torch.bmm(d_out_now, before.mT, out=q_read)
    return kept.mul_(update.whole)
