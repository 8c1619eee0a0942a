"""The forward and the backward pass: what is read when, block of heads by block and window by window.

A block is a few key heads with the value heads that read them, a window a few time steps.  On the CPU both are small:
what is computed from a window stays in the cache, and what the backward pass keeps of a block takes little fresh
memory, whose page faults cost time.  Elsewhere a block holds as many value heads as there are key heads.

Shapes: T tokens, H key heads, HV value heads, K and V head sizes.  More, and formulas: see `chunks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_packfree.ops.delta_rule.torch_chunked.chunks import (
    Gates,
    Units,
    make_gates,
    make_keys,
    make_output,
    make_queries,
    make_solve,
    make_update,
)
from hf_packfree.ops.delta_rule.torch_chunked.gradients import finish_keys, finish_values
from hf_packfree.ops.delta_rule.torch_chunked.layout import TokenReader, TokenWriter, Window, plan_windows
from hf_packfree.ops.delta_rule.torch_chunked.scan import scan_gradients, scan_outputs, scan_states
from hf_packfree.ops.delta_rule.torch_chunked.scratch import scratch_for
from hf_packfree.packing import PackedSequence

_CHUNK_ON_CPU, _CHUNK = 32, 64  # the shorter does a fifth less arithmetic, the longer takes half the steps
_HEADS, _ROWS = 8, 512  # on the CPU: value heads of a block, chunks x value heads of a window


class Block(NamedTuple):
    """Some key heads and the `size` value heads that read them."""

    keys: slice
    values: slice
    size: int


class Local(NamedTuple):
    """What the chunks of one window need before any state is known, values apart."""

    keys: Units
    gates: Gates
    solve: Tensor


class Trail(NamedTuple):
    """What the backward pass keeps of a block: the state before every chunk, the new values, and each window's part."""

    states: Tensor
    new: Tensor
    local: list[Local]


class Source:
    """The inputs, read and prepared one block and window at a time."""

    def __init__(self, inputs: Sequence[Tensor], size: int, packed: PackedSequence, qk_l2norm: bool) -> None:
        """`inputs`: q, k [T, H, K], v [T, HV, V], g, beta [T, HV]; `size`: K before it was widened."""
        self.qk_l2norm = qk_l2norm
        self.q, self.k, self.v, self.g, self.beta = (TokenReader(x) for x in inputs)
        self.size = size
        dtype = torch.float64 if inputs[0].dtype == torch.float64 else torch.float32
        self.space = scratch_for(packed, inputs[0].device, dtype)

    def local(self, block: Block, window: Window, tag: str = "") -> Local:
        """Prepare keys, decays and triangular systems; `tag` names buffers, written anew where it comes again."""
        space = self.space
        keys = make_keys(self.k.read(block.keys, window, f"k{tag}", space), self.qk_l2norm, space, tag)
        gates_of = ((self.g, f"g{tag}"), (self.beta, f"beta{tag}"))
        g, beta = (x.read(block.values, window, name, space) for x, name in gates_of)
        gates = make_gates(g, beta, space, tag)
        return Local(keys, gates, make_solve(keys, gates, space, tag))

    def queries(self, keys: Units, block: Block, window: Window) -> Units:
        """Prepare the queries."""
        return make_queries(self.q.read(block.keys, window, "q", self.space), keys, self.size, self.qk_l2norm, self.space)

    def values(self, gates: Gates, block: Block, window: Window) -> Tensor:
        """Return beta v, for the scan to overwrite."""
        return self.v.read(block.values, window, "v", self.space).mul_(gates.beta)


def forward_pass(inputs: Sequence[Tensor], size: int, packed: PackedSequence, qk_l2norm: bool) -> Tensor:
    """Compute o [1, T, HV, V] from q, k, v, g, beta, see `Source`."""
    source, out = Source(inputs, size, packed, qk_l2norm), TokenWriter(inputs[2])
    blocks, windows = _plan(inputs, packed)
    for block in blocks:
        state = source.space("state", windows[0].steps[0].docs * block.size, inputs[1].shape[-1], inputs[2].shape[-1])
        for window in windows:
            local = source.local(block, window)
            output = make_output(source.queries(local.keys, block, window), local.gates, source.space)
            values = source.values(local.gates, block, window)
            found = source.space.like("out", values)
            update = make_update(*local, source.space)
            scan_outputs(update, output, values, window.steps, block.size, state, found)
            out.write(found, block.values, window)
    return out.result()


def backward_pass(
    inputs: Sequence[Tensor], d_out: Tensor, size: int, packed: PackedSequence, qk_l2norm: bool
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, g, beta, each [1, ...], from d_out [T, HV, V]."""
    source, d_source = Source(inputs, size, packed, qk_l2norm), TokenReader(d_out)
    writers = tuple(TokenWriter(x) for x in inputs)
    blocks, windows = _plan(inputs, packed)
    for block in blocks:
        _reverse(source, d_source, block, windows, _retrace(source, block, windows), writers)
    return tuple(x.result() for x in writers)


def _retrace(source: Source, block: Block, windows: Sequence[Window]) -> Trail:
    """Run the forward scan once more, and keep its states, and what else no state goes into."""
    space, key_size, value_size = source.space, source.k.table.shape[1], source.v.table.shape[1]
    rows, chunk = (windows[-1].first + windows[-1].num_chunks) * block.size, windows[0].tokens.shape[-1]
    trail = Trail(space("states", rows, key_size, value_size), space("new", rows, chunk, value_size), [])
    for window in windows:
        local = source.local(block, window, f" {window.first}")
        trail.local.append(local)
        values = source.values(local.gates, block, window)
        here = window.rows(block.size)
        states, new = trail.states[here.start :], trail.new[here]
        scan_states(make_update(*local, space), values, window.steps, block.size, states, new)
    return trail


def _reverse(
    source: Source,
    d_source: TokenReader,
    block: Block,
    windows: Sequence[Window],
    trail: Trail,
    writers: Sequence[TokenWriter],
) -> None:
    """Run the gradient from the last window to the first."""
    space, (d_q, d_k, *d_values) = source.space, writers
    first = trail.states[: windows[0].steps[0].docs * block.size]
    d_state, product = space.like("d_state", first).zero_(), space.like("product", first)
    for window, local in zip(reversed(windows), reversed(trail.local), strict=True):
        here = window.rows(block.size)
        keys, gates, _ = local
        queries = source.queries(keys, block, window)
        update, output = make_update(*local, space), make_output(queries, gates, space)
        states, new = trail.states[here], trail.new[here]
        d_out = d_source.read(block.values, window, "out", space, zero_padding=True)
        z = space.like("z", new)
        kept = scan_gradients(update, output, window.steps, block.size, states, new, d_out, d_state, z, product)
        v = source.v.read(block.values, window, "v", space)
        total, found = finish_values(keys, queries, gates, update, output, new, z, d_out, kept, v, space)
        for writer, rows in zip(d_values, found, strict=True):
            writer.write(rows, block.values, window)
        for writer, rows in zip((d_q, d_k), finish_keys(keys, queries, total, source.size, space), strict=True):
            writer.write(rows, block.keys, window)


def _plan(inputs: Sequence[Tensor], packed: PackedSequence) -> tuple[list[Block], tuple[Window, ...]]:
    """Cut into blocks of value heads and windows of time steps, small ones on the CPU."""
    key_heads, groups = inputs[0].shape[1], inputs[2].shape[1] // inputs[0].shape[1]
    heads, rows, chunk = _HEADS, _ROWS, _CHUNK_ON_CPU
    if inputs[0].device.type != "cpu":
        heads, rows, chunk = key_heads, key_heads * packed.num_tokens, _CHUNK
    size = max(1, heads // groups)
    blocks = []
    for first in range(0, key_heads, size):
        last = min(first + size, key_heads)
        blocks.append(Block(slice(first, last), slice(first * groups, last * groups), (last - first) * groups))
    return blocks, packed.cached(plan_windows, chunk, max(1, rows // blocks[0].size))
