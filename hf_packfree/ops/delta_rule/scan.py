"""The two scans over time steps: forward over the chunks of all documents at once, and its gradient backward.

Rows: chunk-major, heads within; the rows of one time step are a slice, see `layout.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hf_packfree.ops.delta_rule.chunks import Gates, Keys, System
from hf_packfree.ops.delta_rule.layout import ChunkLayout


class Rows(NamedTuple):
    """One time step in rows: `now` its rows, `on` the first of them, whose documents have rows `later`."""

    now: slice
    on: slice
    later: slice


class Flow(NamedTuple):
    """What the backward scan finds.

    Attributes:
        signals: [R, 2C, V], the gradient of the new values through X (X^T dN) above the outputs' gradient.
        reads: [R, 2C], the dot of each key and query with its own gradient through the read of the state, unscaled.
        writes: [R, C], the dot of each key with its own gradient through the write to the state.
        carry: [R], the gradient of the chunk's total log decay through what it leaves of the state.
    """

    signals: Tensor
    reads: Tensor
    writes: Tensor
    carry: Tensor


def rows_of(layout: ChunkLayout, heads: int) -> Iterator[Rows]:
    """Yield the rows of every time step in order."""
    for step in layout.steps:
        first, end, on = (n * heads for n in (step.first, step.first + step.docs, step.going_on))
        yield Rows(slice(first, end), slice(first, first + on), slice(end, end + on))


def scan_outputs(keys: Keys, gates: Gates, system: System, steps: list[Rows], outputs: Tensor) -> None:
    """Write o [R, C, V] to `outputs`; the state is kept for the current step alone."""
    chunk = system.solve.shape[-1]
    state = keys.units.new_empty(0)
    for now, on, _ in steps:
        units, values = keys.units[now], system.values[now]
        if state.numel() == 0:
            new = torch.bmm(system.solve[now], values)
            torch.bmm(system.attend[now], new, out=outputs[now])
        else:
            read = torch.bmm(units, state[: len(units)]).mul_(gates.reading[now])
            new = torch.bmm(system.solve[now], read[:, :chunk].add_(values))
            torch.baddbmm(read[:, chunk:], system.attend[now], new, out=outputs[now])
        count = on.stop - on.start
        written = new[:count].mul_(gates.writing[on])
        if state.numel() == 0:
            state = torch.bmm(units[:count, :chunk].mT, written)
        else:
            state = state[:count].mul_(gates.chunk[on])
            state.baddbmm_(units[:count, :chunk].mT, written)


def scan_states(keys: Keys, gates: Gates, system: System, steps: list[Rows]) -> tuple[Tensor, Tensor]:
    """Return the state before every chunk [R, K, V], undefined where it is zero, and the new values N [R, C, V]."""
    chunk = system.solve.shape[-1]
    new = torch.empty_like(system.values)
    states = new.new_empty(len(new), keys.units.shape[-1], new.shape[-1])
    for number, (now, on, later) in enumerate(steps):
        values = system.values[now]
        if number:
            read = torch.bmm(keys.units[now, :chunk], states[now]).mul_(gates.reading[now, :chunk])
            values = read.add_(values)
        torch.bmm(system.solve[now], values, out=new[now])
        written = new[on] * gates.writing[on]
        if number:
            torch.mul(states[on], gates.chunk[on], out=states[later])
            states[later].baddbmm_(keys.units[on, :chunk].mT, written)
        else:
            torch.bmm(keys.units[on, :chunk].mT, written, out=states[later])
    return states, new


def scan_gradients(
    keys: Keys, gates: Gates, system: System, steps: list[Rows], signals: Tensor, d_units: Tensor
) -> tuple[Tensor, Flow]:
    """Run the gradient from the last time step to the first.

    Args:
        signals: [R, 2C, V], the outputs' gradient in the lower half; the upper half is filled in.
        d_units: [R, 2C, K], what the states pass on to the unit keys and queries is added.

    Returns:
        The new values N [R, C, V], and what else the chunk-local gradients need.
    """
    chunk = system.solve.shape[-1]
    states, new = scan_states(keys, gates, system, steps)
    reads, writes, carry = (new.new_zeros(s) for s in (signals.shape[:2], new.shape[:2], new.shape[:1]))
    flow = Flow(signals, reads, writes, carry)
    d_state = torch.zeros_like(states[steps[0].now])
    for number, (now, on, _) in reversed(list(enumerate(steps))):
        d_new = torch.bmm(system.attend[now].mT, signals[now, chunk:])
        if on.stop > on.start:
            d_after = d_state[: on.stop - on.start]
            d_written = torch.bmm(new[on] * gates.writing[on], d_after.mT)
            d_units[on, :chunk] += d_written
            torch.sum(d_written.mul_(keys.units[on, :chunk]), -1, out=flow.writes[on])
            torch.sum(flow.writes[on], -1, out=flow.carry[on])
            d_new[: len(d_after)] += torch.bmm(keys.units[on, :chunk], d_after).mul_(gates.writing[on])
            if number:
                kept = torch.bmm(states[on].flatten(1)[:, None], d_after.flatten(1)[..., None])
                flow.carry[on] += (kept * gates.chunk[on]).flatten()
        signals[now, :chunk] = torch.bmm(system.solve[now].mT, d_new)
        if number:
            reading, units = gates.reading[now], keys.units[now]
            d_read = torch.bmm(signals[now], states[now].mT)
            torch.sum(d_read * units, -1, out=flow.reads[now])
            d_units[now] += d_read.mul_(reading)
            d_before = d_state[: len(units)].mul_(gates.chunk[now])
            d_before.baddbmm_(units.mT, signals[now] * reading)
    return new, flow
