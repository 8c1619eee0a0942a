"""The forward and the backward pass: what is read when, block of heads by block and window by window.

A block is a few key heads with the value heads that read them; those are taken in lanes of one value head per key head,
so that a lane's rows match the key's.  A window is a few time steps.  Both are small enough on the CPU for what is
computed from them to stay in the cache; elsewhere there is one of each.

Shapes: T tokens, H key heads, HV value heads, K and V head sizes.  Formulas: see `chunks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_packfree.ops.delta_rule.chunks import (
    Gates,
    Units,
    Update,
    make_gates,
    make_keys,
    make_output,
    make_queries,
    make_solve,
    make_update,
)
from hf_packfree.ops.delta_rule.gradients import add_head, finish_keys, zero_gradients
from hf_packfree.ops.delta_rule.layout import Window, plan_windows
from hf_packfree.ops.delta_rule.rows import TokenReader, TokenWriter
from hf_packfree.ops.delta_rule.scan import scan_gradients, scan_outputs, scan_states
from hf_packfree.ops.delta_rule.scratch import Scratch
from hf_packfree.packing import PackedSequence

_CHUNK_ON_CPU, _CHUNK = 32, 64  # the shorter does a fifth less arithmetic, the longer takes half the steps
_FORWARD_HEADS, _FORWARD_ROWS = 16, 256  # on the CPU: key heads of a block, chunks x heads of a window
_BACKWARD_HEADS, _BACKWARD_ROWS = 8, 128


class Block(NamedTuple):
    """`size` key heads and the lanes of value heads that read them."""

    heads: slice
    size: int
    lanes: list[slice]


class Local(NamedTuple):
    """What a lane's chunks of one window need before any state is known, values apart."""

    gates: Gates
    solve: Tensor


class Trail(NamedTuple):
    """What the backward pass keeps of one lane: the state before every chunk, the new values, and each window's part."""

    states: Tensor
    new: Tensor
    local: dict[int, Local]


class Source:
    """The inputs, read and prepared one block and window at a time."""

    def __init__(self, inputs: Sequence[Tensor], size: int, unit: bool) -> None:
        """`inputs`: q, k [T, H, K], v [T, HV, V], g, beta [T, HV]; `size`: K before it was widened; `unit`: norms are 1."""
        self.unit = unit
        self.q, self.k, self.v, self.g, self.beta = (TokenReader(x) for x in inputs)
        self.size = size
        dtype = torch.float64 if inputs[0].dtype == torch.float64 else torch.float32
        self.space = Scratch(inputs[0].device, dtype)

    def keys(self, heads: slice, window: Window, tag: str = "") -> Units:
        """Prepare a block's keys; `tag` names the buffers, which are written anew where it comes again."""
        return make_keys(self.k.read(heads, window, f"k{tag}", self.space), self.unit, self.space, tag)

    def queries(self, keys: Units, heads: slice, window: Window) -> Units:
        """Prepare a block's queries."""
        return make_queries(self.q.read(heads, window, "q", self.space), keys, self.size, self.unit, self.space)

    def local(self, keys: Units, lane: slice, window: Window, tag: str = "") -> Local:
        """Prepare one lane's decays and its triangular system."""
        g, beta = (x.read(lane, window, f"{name}{tag}", self.space) for x, name in ((self.g, "g"), (self.beta, "beta")))
        gates = make_gates(g, beta, self.space, tag)
        return Local(gates, make_solve(keys, gates, self.space, tag))

    def update(self, keys: Units, local: Local, lane: slice, window: Window) -> Update:
        """Prepare one lane's part in the scan, which overwrites it."""
        return make_update(keys, *local, self.v.read(lane, window, "v", self.space), self.space)


def forward_pass(inputs: Sequence[Tensor], size: int, packed: PackedSequence, unit: bool) -> Tensor:
    """Compute o [1, T, HV, V] from q, k, v, g, beta, see `Source`."""
    source, out = Source(inputs, size, unit), TokenWriter(inputs[2])
    blocks, windows = _plan(inputs, packed, _FORWARD_HEADS, _FORWARD_ROWS)
    for heads, count, lanes in blocks:
        shape = windows[0].steps[0].docs * count, inputs[1].shape[-1], inputs[2].shape[-1]
        states = [source.space(f"state {number}", *shape) for number in range(len(lanes))]
        for window in windows:
            keys = source.keys(heads, window)
            queries = source.queries(keys, heads, window)
            for lane, state in zip(lanes, states, strict=True):
                local = source.local(keys, lane, window)
                update = source.update(keys, local, lane, window)
                found = source.space.like("out", update.values)
                output = make_output(queries, local.gates, source.space)
                scan_outputs(update, output, window.steps, count, state, found)
                out.write(found, lane, window)
    return out.result()


def backward_pass(
    inputs: Sequence[Tensor], d_out: Tensor, size: int, packed: PackedSequence, unit: bool
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, g, beta, each [1, ...], from d_out [T, HV, V]."""
    source, d_source = Source(inputs, size, unit), TokenReader(d_out)
    writers = tuple(TokenWriter(x) for x in inputs)
    blocks, windows = _plan(inputs, packed, _BACKWARD_HEADS, _BACKWARD_ROWS)
    for block in blocks:
        keys, trails = _retrace(source, block, windows)
        _reverse(source, d_source, block, windows, keys, trails, writers)
    return tuple(x.result() for x in writers)


def _retrace(source: Source, block: Block, windows: Sequence[Window]) -> tuple[list[Units], list[Trail]]:
    """Run the forward scan once more, and keep its states, each window's keys, and what else no state goes into."""
    rows, chunk = (windows[-1].first + windows[-1].num_chunks) * block.size, windows[0].tokens.shape[-1]
    key_size, value_size = source.k.table.shape[1], source.v.table.shape[1]
    states = (source.space(f"states {lane}", rows, key_size, value_size) for lane in range(len(block.lanes)))
    news = (source.space(f"new {lane}", rows, chunk, value_size) for lane in range(len(block.lanes)))
    trails = [Trail(*both, {}) for both in zip(states, news, strict=True)]
    kept = []
    for window in windows:
        keys = source.keys(block.heads, window, f" {window.first}")
        kept.append(keys)
        first = window.first * block.size
        for number, (lane, trail) in enumerate(zip(block.lanes, trails, strict=True)):
            local = trail.local[window.first] = source.local(keys, lane, window, f" {window.first} {number}")
            new = trail.new[first : first + len(keys.x)]
            update = source.update(keys, local, lane, window)
            scan_states(update, window.steps, block.size, trail.states[first:], new)
    return kept, trails


def _reverse(
    source: Source,
    d_source: TokenReader,
    block: Block,
    windows: Sequence[Window],
    kept_keys: Sequence[Units],
    trails: Sequence[Trail],
    writers: Sequence[TokenWriter],
) -> None:
    """Run the gradient from the last window to the first."""
    space, (d_q, d_k, *d_head) = source.space, writers
    d_states = [torch.zeros_like(trail.states[: windows[0].steps[0].docs * block.size]) for trail in trails]
    for window, keys in zip(reversed(windows), reversed(kept_keys), strict=True):
        here = slice(window.first * block.size, window.first * block.size + len(keys.x))
        queries = source.queries(keys, block.heads, window)
        total = zero_gradients(keys, queries, space)
        for lane, trail, d_state in zip(block.lanes, trails, d_states, strict=True):
            local = trail.local[window.first]
            gates, update = local.gates, source.update(keys, local, lane, window)
            output = make_output(queries, gates, space)
            new, states = trail.new[here], trail.states[here]
            d_out = d_source.read(lane, window, "out", space, zero_padding=True)
            kept = scan_gradients(update, output, window.steps, block.size, states, new, d_out, d_state)
            v = source.v.read(lane, window, "raw", space)
            found = add_head(keys, queries, gates, update, output, new, d_out, kept, v, total, space)
            for writer, rows in zip(d_head, found, strict=True):
                writer.write(rows, lane, window)
        for writer, rows in zip((d_q, d_k), finish_keys(keys, queries, total, source.size, space), strict=True):
            writer.write(rows, block.heads, window)


def _plan(
    inputs: Sequence[Tensor], packed: PackedSequence, heads: int, rows: int
) -> tuple[list[Block], tuple[Window, ...]]:
    """Cut into blocks of `heads` and windows of `rows`, on the CPU."""
    key_heads, groups = inputs[0].shape[1], inputs[2].shape[1] // inputs[0].shape[1]
    chunk = _CHUNK_ON_CPU
    if inputs[0].device.type != "cpu":
        heads, rows, chunk = key_heads, key_heads * packed.num_tokens, _CHUNK
    blocks = []
    for first in range(0, key_heads, heads):
        last = min(first + heads, key_heads)
        lanes = [slice(first * groups + lane, (last - 1) * groups + lane + 1, groups) for lane in range(groups)]
        blocks.append(Block(slice(first, last, 1), last - first, lanes))
    return blocks, packed.derive(plan_windows, chunk, max(1, rows // blocks[0].size))
