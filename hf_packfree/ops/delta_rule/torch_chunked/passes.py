"""The forward and the backward pass, one block of heads and one window of chunks at a time.

A block is a few key heads with the value heads that read them, a window a few time steps. On the
CPU both are small: the intermediates of a window stay in the cache, and the backward pass takes
little fresh memory for a block, whose page faults cost time. Elsewhere a block holds as many value
heads as there are key heads.

Shapes: T tokens, H key heads, HV value heads, K and V head sizes. More, and formulas: see
`chunks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_packfree.ops.chunked.layout import (
    TokenReader,
    TokenWriter,
    Window,
    document_order,
    plan_windows,
)
from hf_packfree.ops.chunked.scan import scan_gradients, scan_outputs, scan_states
from hf_packfree.ops.chunked.scratch import Scratch, scratch_for
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
from hf_packfree.packing import PackedSequence

# tokens of a chunk: half of _CHUNK does a fifth less arithmetic, in twice the steps
_CHUNK_ON_CPU = 32
_CHUNK = 64
# on the CPU: value heads of a block
_HEADS = 8
# on the CPU: chunks x value heads of a window
_ROWS = 512


class Block(NamedTuple):
    """Some key heads and the `size` value heads that read them."""

    keys: slice
    values: slice
    size: int


class States(NamedTuple):
    """The initial states of documents, or the gradients of their final states.

    Attributes:
        given: [N, HV, K, V], in the order of the documents.
        order: int64 [N], the document that each row of the scan's states belongs to, see
            `layout.py`.
    """

    given: Tensor
    order: Tensor

    def rows(self, block: Block, name: str, space: Scratch) -> Tensor:
        """Return a block's states as the buffer `name`, [N x heads, K, V]."""
        mine = self.given.index_select(0, self.order)[:, block.values].flatten(0, 1)
        return space.like(name, mine).copy_(mine)

    def empty(self) -> Tensor:
        """Return memory for the states of the same documents."""
        return torch.empty_like(self.given)

    def put(self, rows: Tensor, block: Block, found: Tensor) -> None:
        """Write a block's `rows` to `found`, one state for each document."""
        found[:, block.values] = rows.unflatten(0, (-1, block.size))[self.order.argsort()].to(
            found.dtype
        )


class WindowChunks(NamedTuple):
    """The parts of one window's chunks that do not depend on a state, without the values."""

    keys: Units
    gates: Gates
    solve: Tensor


class ChunkStates(NamedTuple):
    """Intermediates of a block that the backward pass recomputes: the state before every chunk, the
    new values, and each window's `WindowChunks`.
    """

    states: Tensor
    new: Tensor
    local: list[WindowChunks]


class Source:
    """The inputs, read and prepared one block and window at a time."""

    def __init__(
        self,
        inputs: Sequence[Tensor],
        size: int,
        packed: PackedSequence,
        qk_l2norm: bool,
        states: bool = False,
    ) -> None:
        """Keep the inputs, unprepared.

        Args:
            inputs: q, k [T, H, K], v [T, HV, V], g, beta [T, HV].
            size: K before it was widened.
            packed, qk_l2norm: see `hf_packfree.ops.delta_rule.gated_delta_rule`.
            states: the final states are read, so padding in the last chunk may neither decay nor
                write to them.
        """
        self.qk_l2norm, self.states = qk_l2norm, states
        self.q, self.k, self.v, self.g, self.beta = (TokenReader(x) for x in inputs)
        self.size = size
        dtype = torch.float64 if inputs[0].dtype == torch.float64 else torch.float32
        self.space = scratch_for(packed, inputs[0].device, dtype)

    def local(self, block: Block, window: Window, tag: str = "") -> WindowChunks:
        """Prepare keys, decays and triangular systems; `tag` names the buffers, which a later call
        with the same tag overwrites.
        """
        space = self.space
        keys = make_keys(
            self.k.read(block.keys, window, f"k{tag}", space), self.qk_l2norm, space, tag
        )
        gates_of = ((self.g, f"g{tag}"), (self.beta, f"beta{tag}"))
        g, beta = (
            x.read(block.values, window, name, space, zero_padding=self.states)
            for x, name in gates_of
        )
        gates = make_gates(g, beta, space, tag)
        return WindowChunks(keys, gates, make_solve(keys, gates, space, tag))

    def queries(self, keys: Units, block: Block, window: Window) -> Units:
        """Prepare the queries."""
        return make_queries(
            self.q.read(block.keys, window, "q", self.space),
            keys,
            self.size,
            self.qk_l2norm,
            self.space,
        )

    def values(self, gates: Gates, block: Block, window: Window) -> Tensor:
        """Return beta v, for the scan to overwrite."""
        return self.v.read(block.values, window, "v", self.space).mul_(gates.beta)


def forward_pass(
    inputs: Sequence[Tensor],
    size: int,
    packed: PackedSequence,
    qk_l2norm: bool,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute o [1, T, HV, V] from q, k, v, g, beta, see `Source`; and, given `initial_state` [N,
    HV, K, V], the final states.
    """
    source, out = (
        Source(inputs, size, packed, qk_l2norm, initial_state is not None),
        TokenWriter(inputs[2]),
    )
    blocks, windows = _plan(inputs, packed)
    states = _states(initial_state, windows, packed)
    final = None if states is None else states.empty()
    for block in blocks:
        if states is None:
            state = source.space(
                "state",
                windows[0].steps[0].docs * block.size,
                inputs[1].shape[-1],
                inputs[2].shape[-1],
            )
        else:
            state = states.rows(block, "state", source.space)
        for window in windows:
            local = source.local(block, window)
            output = make_output(
                source.queries(local.keys, block, window), local.gates, source.space
            )
            values = source.values(local.gates, block, window)
            found = source.space.like("out", values)
            update = make_update(*local, source.space)
            steps = window.steps if states is None else window.steps_with_states(final=True)
            scan_outputs(update, output, values, steps, block.size, state, found)
            out.write(found, block.values, window)
        if states is not None and final is not None:
            states.put(state, block, final)
    return out.result(), final


def backward_pass(
    inputs: Sequence[Tensor],
    d_out: Tensor,
    size: int,
    packed: PackedSequence,
    qk_l2norm: bool,
    initial_state: Tensor | None = None,
    d_final: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, g, beta, each [1, ...], and of the initial state.

    Args:
        inputs, size, packed, qk_l2norm: see `Source`.
        d_out: [T, HV, V].
        initial_state, d_final: [N, HV, K, V], or both None.
    """
    source = Source(inputs, size, packed, qk_l2norm, initial_state is not None)
    blocks, windows = _plan(inputs, packed)
    states, ends = (_states(x, windows, packed) for x in (initial_state, d_final))
    tensors = BackwardTensors(
        source, TokenReader(d_out), tuple(TokenWriter(x) for x in inputs), states, ends
    )
    d_initial = None if states is None else states.empty()
    for block in blocks:
        d_state = _reverse(tensors, block, windows, _retrace(source, block, windows, states))
        if states is not None and d_initial is not None:
            states.put(d_state, block, d_initial)
    return *(x.result() for x in tensors.writers), d_initial


def _states(
    given: Tensor | None, windows: Sequence[Window], packed: PackedSequence
) -> States | None:
    if given is None:
        return None
    return States(given, packed.cached(document_order, windows[0].tokens.shape[-1]))


def _retrace(
    source: Source, block: Block, windows: Sequence[Window], given: States | None
) -> ChunkStates:
    """Run the forward scan again; keep the states before each chunk, and everything that does not
    depend on a state.
    """
    space, key_size, value_size = source.space, source.k.table.shape[1], source.v.table.shape[1]
    rows, chunk = (
        (windows[-1].first + windows[-1].num_chunks) * block.size,
        windows[0].tokens.shape[-1],
    )
    chunk_states = ChunkStates(
        space("states", rows, key_size, value_size), space("new", rows, chunk, value_size), []
    )
    if given is not None:
        opening = given.rows(block, "state", space)
        chunk_states.states[: len(opening)].copy_(opening)
    for window in windows:
        local = source.local(block, window, f" {window.first}")
        chunk_states.local.append(local)
        values = source.values(local.gates, block, window)
        here = window.rows(block.size)
        states, new = chunk_states.states[here.start :], chunk_states.new[here]
        steps = window.steps if given is None else window.steps_with_states(final=False)
        scan_states(make_update(*local, space), values, steps, block.size, states, new)
    return chunk_states


class BackwardTensors(NamedTuple):
    """The tensors that the backward pass reads and writes: inputs, the gradient of the output, the
    gradients of the inputs, and states.
    """

    source: Source
    d_source: TokenReader
    writers: tuple[TokenWriter, ...]
    states: States | None
    ends: States | None


def _reverse(
    tensors: BackwardTensors, block: Block, windows: Sequence[Window], chunk_states: ChunkStates
) -> Tensor:
    """Run the gradient from the last window to the first; return the gradient of the initial
    states, [N x heads, K, V].
    """
    source, (d_q, d_k, *d_values) = tensors.source, tensors.writers
    space = source.space
    first = chunk_states.states[: windows[0].steps[0].docs * block.size]
    product = space.like("product", first)
    d_state = (
        space.like("d_state", first).zero_()
        if tensors.ends is None
        else tensors.ends.rows(block, "d_state", space)
    )
    for window, local in zip(reversed(windows), reversed(chunk_states.local), strict=True):
        here = window.rows(block.size)
        keys, gates, _ = local
        queries = source.queries(keys, block, window)
        update, output = make_update(*local, space), make_output(queries, gates, space)
        states, new = chunk_states.states[here], chunk_states.new[here]
        d_out = tensors.d_source.read(block.values, window, "out", space, zero_padding=True)
        z = space.like("z", new)
        steps = window.steps if tensors.states is None else window.steps_with_states(final=True)
        kept = scan_gradients(
            update, output, steps, block.size, states, new, d_out, d_state, z, product
        )
        v = source.v.read(block.values, window, "v", space)
        total, found = finish_values(
            keys, queries, gates, update, output, new, z, d_out, kept, v, space
        )
        for writer, rows in zip(d_values, found, strict=True):
            writer.write(rows, block.values, window)
        for writer, rows in zip(
            (d_q, d_k), finish_keys(keys, queries, total, source.size, space), strict=True
        ):
            writer.write(rows, block.keys, window)
    return d_state


def _plan(
    inputs: Sequence[Tensor], packed: PackedSequence
) -> tuple[list[Block], tuple[Window, ...]]:
    """Cut the heads into blocks and the time steps into windows, small ones on the CPU."""
    key_heads, groups = inputs[0].shape[1], inputs[2].shape[1] // inputs[0].shape[1]
    heads, rows, chunk = _HEADS, _ROWS, _CHUNK_ON_CPU
    if inputs[0].device.type != "cpu":
        heads, rows, chunk = key_heads, key_heads * packed.num_tokens, _CHUNK
    size = max(1, heads // groups)
    blocks = []
    for first in range(0, key_heads, size):
        last = min(first + size, key_heads)
        blocks.append(
            Block(slice(first, last), slice(first * groups, last * groups), (last - first) * groups)
        )
    return blocks, packed.cached(plan_windows, chunk, max(1, rows // blocks[0].size))
