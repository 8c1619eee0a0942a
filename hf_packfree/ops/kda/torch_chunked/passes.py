"""The forward and the backward pass, one block of heads and one window of chunks at a time.

A window is a few time steps. On the CPU blocks and windows are small: the intermediates of a window
stay in the cache, and the backward pass takes little fresh memory for a block, whose page faults
cost time.

Shapes: T tokens, H heads, K and V head sizes. More, and formulas: see `chunks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_packfree.ops.chunked.layout import TokenReader, TokenWriter, Window, plan_windows
from hf_packfree.ops.chunked.scan import scan_gradients, scan_outputs, scan_states
from hf_packfree.ops.chunked.scratch import scratch_for
from hf_packfree.ops.kda.torch_chunked.chunks import (
    Unit,
    WindowChunks,
    finish,
    make_gates,
    make_local,
    make_output,
    make_unit,
    make_update,
)
from hf_packfree.packing import PackedSequence

# tokens of a chunk
_CHUNK = 32
# on the CPU: heads of a block
_HEADS = 8
# on the CPU: chunks x heads of a window
_ROWS = 256


class ChunkStates(NamedTuple):
    """Intermediates of a block that the backward pass recomputes: the state before every chunk, the
    new values, and each window's queries and `WindowChunks`.
    """

    states: Tensor
    new: Tensor
    local: list[WindowChunks]


class Source:
    """The inputs, read and prepared one block of heads and window at a time."""

    def __init__(
        self, inputs: Sequence[Tensor], size: int, packed: PackedSequence, qk_l2norm: bool
    ) -> None:
        """Keep the inputs, unprepared.

        Args:
            inputs: q, k [T, H, K], v [T, H, V], g [T, H, K], beta [T, H].
            size: K before it was widened.
            packed, qk_l2norm: see `hf_packfree.ops.kda.kda`.
        """
        self.q, self.k, self.v, self.g, self.beta = (TokenReader(x) for x in inputs)
        self.size, self.qk_l2norm = size, qk_l2norm
        dtype = torch.float64 if inputs[0].dtype == torch.float64 else torch.float32
        self.space = scratch_for(packed, inputs[0].device, dtype)

    def queries(self, heads: slice, window: Window) -> Unit:
        """Prepare the queries."""
        q = self.q.read(heads, window, "q", self.space)
        return make_unit(q, self.size**-0.5, self.qk_l2norm, self.space)

    def local(self, q: Unit, heads: slice, window: Window, tag: str = "") -> WindowChunks:
        """Prepare keys, decays, products and triangular systems; `tag` names the buffers, which a
        later call with the same tag overwrites.
        """
        k, g, beta = (
            reader.read(heads, window, f"{name}{tag}", self.space)
            for reader, name in ((self.k, "k"), (self.g, "g"), (self.beta, "beta"))
        )
        unit = make_unit(k, 1.0, self.qk_l2norm, self.space)
        return make_local(q, unit, make_gates(g, beta, self.space, tag), self.space, tag)

    def values(self, local: WindowChunks, heads: slice, window: Window) -> Tensor:
        """Return beta v, for the scan to overwrite."""
        return self.v.read(heads, window, "v", self.space).mul_(local.gates.beta)


def forward_pass(
    inputs: Sequence[Tensor], size: int, packed: PackedSequence, qk_l2norm: bool
) -> Tensor:
    """Compute o [1, T, H, V] from q, k, v, g, beta, see `Source`."""
    source, out = Source(inputs, size, packed, qk_l2norm), TokenWriter(inputs[2])
    blocks, windows = _plan(inputs, packed)
    space = source.space
    for heads in blocks:
        count = heads.stop - heads.start
        rows = windows[0].steps[0].docs * count
        state = space("state", rows, inputs[1].shape[-1], inputs[2].shape[-1])
        for window in windows:
            q = source.queries(heads, window)
            local = source.local(q, heads, window)
            update, output = make_update(local, space), make_output(q, local, space)
            values = source.values(local, heads, window)
            found = space.like("out", values)
            scan_outputs(update, output, values, window.steps, count, state, found)
            out.write(found, heads, window)
    return out.result()


def backward_pass(
    inputs: Sequence[Tensor], d_out: Tensor, size: int, packed: PackedSequence, qk_l2norm: bool
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, g, beta, each [1, ...].

    Args:
        inputs, size, packed, qk_l2norm: see `Source`.
        d_out: [T, H, V].
    """
    source, d_source = Source(inputs, size, packed, qk_l2norm), TokenReader(d_out)
    writers = tuple(TokenWriter(x) for x in inputs)
    blocks, windows = _plan(inputs, packed)
    for heads in blocks:
        chunk_states = _retrace(source, heads, windows)
        _reverse(source, d_source, writers, heads, windows, chunk_states)
    return tuple(writer.result() for writer in writers)


def _retrace(source: Source, heads: slice, windows: Sequence[Window]) -> ChunkStates:
    """Run the forward scan again; keep the states before each chunk, and everything that does not
    depend on a state.
    """
    space, count, chunk = source.space, heads.stop - heads.start, windows[0].tokens.shape[-1]
    key_size, value_size = source.k.table.shape[1], source.v.table.shape[1]
    rows = (windows[-1].first + windows[-1].num_chunks) * count
    states, new = space("states", rows, key_size, value_size), space("new", rows, chunk, value_size)
    chunk_states = ChunkStates(states, new, [])
    for window in windows:
        q = source.queries(heads, window)
        local = source.local(q, heads, window, f" {window.first}")
        chunk_states.local.append(local)
        values, here = source.values(local, heads, window), window.rows(count)
        update = make_update(local, space)
        scan_states(update, values, window.steps, count, states[here.start :], new[here])
    return chunk_states


def _reverse(
    source: Source,
    d_source: TokenReader,
    writers: Sequence[TokenWriter],
    heads: slice,
    windows: Sequence[Window],
    chunk_states: ChunkStates,
) -> None:
    """Run the gradient from the last window to the first, and write it to `writers`."""
    space, count = source.space, heads.stop - heads.start
    first = chunk_states.states[: windows[0].steps[0].docs * count]
    product, d_state = space.like("product", first), space.like("d_state", first).zero_()
    for window, local in zip(reversed(windows), reversed(chunk_states.local), strict=True):
        here, q = window.rows(count), source.queries(heads, window)
        update, output = make_update(local, space), make_output(q, local, space)
        states, new = chunk_states.states[here], chunk_states.new[here]
        d_out = d_source.read(heads, window, "out", space, zero_padding=True)
        z = space.like("z", new)
        kept = scan_gradients(
            update, output, window.steps, count, states, new, d_out, d_state, z, product
        )
        v = source.v.read(heads, window, "v", space)
        found = finish(q, local, update, output, new, z, d_out, kept, v, source.size, space)
        for writer, rows in zip(writers, found, strict=True):
            writer.write(rows, heads, window)


def _plan(
    inputs: Sequence[Tensor], packed: PackedSequence
) -> tuple[list[slice], tuple[Window, ...]]:
    """Cut the heads into blocks and the time steps into windows, small ones on the CPU."""
    heads, on_cpu = inputs[0].shape[1], inputs[0].device.type == "cpu"
    size = min(heads, _HEADS) if on_cpu else heads
    blocks = [slice(first, min(first + size, heads)) for first in range(0, heads, size)]
    limit = max(1, _ROWS // size) if on_cpu else packed.num_tokens
    return blocks, packed.cached(plan_windows, _CHUNK, limit)
