"""The scans over time steps: forward over the chunks of all documents at once, and its gradient backward.

Rows are sorted by time step, those of documents that go on first, see `layout.py`; notation in `chunks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_packfree.ops.delta_rule.chunks import System
from hf_packfree.ops.delta_rule.layout import Step


def scan_outputs(system: System, steps: Sequence[Step], heads: int, state: Tensor) -> Tensor:
    """Return o [R, C, V].

    Args:
        system: of all rows; its values are overwritten.
        steps: the time steps that the rows belong to.
        heads: rows per chunk.
        state: [rows of the very first step, K, V], the state before the first of `steps`; left as after the last.
    """
    out = torch.empty_like(system.values)
    sizes = [step.docs * heads for step in steps]
    views = zip(steps, out.split(sizes), *(x.split(sizes) for x in system), strict=True)
    for step, out_now, k_read, q_read, k_write, values, solve, attend, whole in views:
        before = state[: len(out_now)]
        if step.opens:
            new = torch.bmm(solve, values)
            torch.bmm(attend, new, out=out_now)
        else:
            new = torch.bmm(solve, values.baddbmm_(k_read, before))
            torch.bmm(q_read, before, out=out_now).baddbmm_(attend, new)
        on = step.going_on * heads
        if step.opens:
            torch.bmm(k_write[:on].mT, new[:on], out=before[:on])
        else:
            before[:on].mul_(whole[:on]).baddbmm_(k_write[:on].mT, new[:on])
    return out


def scan_states(system: System, steps: Sequence[Step], heads: int, states: Tensor, new: Tensor) -> None:
    """Compute the state before every chunk and the new values N.

    Args:
        states: [R, K, V], overwritten; undefined in the rows of the first step, where the state is zero.
        new: [R, C, V], overwritten.
    """
    sizes = [step.docs * heads for step in steps]
    nexts = (*states.split(sizes)[1:], states[:0])
    views = zip(steps, new.split(sizes), states.split(sizes), nexts, *(x.split(sizes) for x in system), strict=True)
    for step, new_now, before, after, k_read, _, k_write, values, solve, _, whole in views:
        on = step.going_on * heads
        if step.opens:
            torch.bmm(solve, values, out=new_now)
            torch.bmm(k_write[:on].mT, new_now[:on], out=after)
        else:
            torch.bmm(solve, values.baddbmm_(k_read, before), out=new_now)
            torch.mul(before[:on], whole[:on], out=after)
            after.baddbmm_(k_write[:on].mT, new_now[:on])


def scan_gradients(
    system: System, steps: Sequence[Step], heads: int, states: Tensor, new: Tensor, d_out: Tensor, kept: Tensor
) -> None:
    """Run the gradient from the last time step to the first, with what `scan_states` found.

    Every factor is overwritten by its gradient: `system.k_read`, `system.q_read`, `system.k_write`, and
    `system.values` by Z = X^T dN.  `kept` [R] gets the gradient of G_C through exp(G_C) S.
    """
    sizes = [step.docs * heads for step in steps]
    d_state = torch.zeros_like(states[: sizes[0]])
    product = torch.empty_like(d_state)
    views = zip(steps, *(x.split(sizes) for x in (new, states, d_out, kept, *system)), strict=True)
    for step, new_now, before, d_out_now, kept_now, k_read, q_read, k_write, z, solve, attend, whole in reversed(
        list(views)
    ):
        on, after = step.going_on * heads, d_state[: step.going_on * heads]
        d_new = torch.bmm(attend.mT, d_out_now)
        if on:
            d_new[:on].baddbmm_(k_write[:on], after)
            torch.bmm(new_now[:on], after.mT, out=k_write[:on])
        k_write[on:].zero_()
        torch.bmm(solve.mT, d_new, out=z)
        if step.opens:
            kept_now.zero_()
            k_read.zero_()
            q_read.zero_()
            continue
        kept_now[on:].zero_()
        if on:
            torch.mul(before[:on], after, out=product[:on]).mul_(whole[:on])
            torch.sum(product[:on], (1, 2), out=kept_now[:on])
        d_before = d_state[: len(z)].mul_(whole)
        d_before.baddbmm_(k_read.mT, z).baddbmm_(q_read.mT, d_out_now)
        torch.bmm(z, before.mT, out=k_read)
        torch.bmm(d_out_now, before.mT, out=q_read)
