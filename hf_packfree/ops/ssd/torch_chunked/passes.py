"""The forward and the backward pass, one block of heads and one window of chunks at a time.

A block is a few heads of one group, a window a few time steps. On the CPU both are small: the
intermediates of a window stay in the cache, and the backward pass takes little fresh memory for a
block, whose page faults cost time.

Shapes: T tokens, H heads of size P, G groups, state size N. More, and formulas: see `chunks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hf_packfree.ops.chunked.decays import make_decays
from hf_packfree.ops.chunked.layout import TokenReader, TokenWriter, Window, plan_windows
from hf_packfree.ops.chunked.scratch import scratch_for
from hf_packfree.ops.ssd.torch_chunked.chunks import Chunks, keep_states, outputs, read_states
from hf_packfree.ops.ssd.torch_chunked.gradients import WindowGradients, gradients
from hf_packfree.packing import PackedSequence

_CHUNK = 64
# heads of a block
_HEADS = 32
_HEADS_ON_CPU = 8
# chunks x heads of a window
_ROWS_ON_CPU = 512


class Block(NamedTuple):
    """Some heads of one group: the group's number, the heads, and their count."""

    group: slice
    heads: slice
    size: int


class Source:
    """The inputs, read and prepared one block and window at a time."""

    def __init__(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        packed: PackedSequence,
    ) -> None:
        """Keep the inputs x [T, H, P], dt [T, H], A, D [H] and B, C [T, G, N], unprepared."""
        self.dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        self.A, self.D = A.to(self.dtype), D.to(self.dtype)
        self.x, self.dt, self.B, self.C = map(TokenReader, (x, dt, B, C))
        self.space = scratch_for(packed, x.device, self.dtype)
        self.groups, self.share = B.shape[1], x.shape[1] // B.shape[1]
        on_cpu = x.device.type == "cpu"
        self.most = min(self.share, _HEADS_ON_CPU if on_cpu else _HEADS)
        rows = _ROWS_ON_CPU if on_cpu else packed.num_tokens * self.most
        self.windows = packed.cached(plan_windows, _CHUNK, max(1, rows // self.most))

    def blocks(self) -> Iterator[Block]:
        """Yield blocks of heads, one group after the other."""
        for group in range(self.groups):
            last = (group + 1) * self.share
            for head in range(group * self.share, last, self.most):
                end = min(head + self.most, last)
                yield Block(slice(group, group + 1), slice(head, end), end - head)

    def values(self, block: Block, window: Window) -> Tensor:
        """Return x [R, C, P]."""
        return self.x.read(block.heads, window, "x", self.space)

    def chunks(self, block: Block, window: Window, x: Tensor, tag: str = "") -> Chunks:
        """Prepare a window's chunks, given its x; `tag` names the buffers, which a later call with
        the same tag overwrites.
        """
        space = self.space
        dt = self.dt.read(block.heads, window, f"dt{tag}", space)
        steps = dt.unflatten(0, (-1, block.size))
        g = torch.mul(steps, self.A[block.heads, None, None], out=space("g", *steps.shape))
        B, C = (
            part.read(block.group, window, f"{name}{tag}", space)
            for part, name in ((self.B, "B"), (self.C, "C"))
        )
        return Chunks(
            block.size,
            torch.mul(x, dt, out=space.like(f"u{tag}", x)),
            dt,
            make_decays(g.flatten(0, 1), space, tag),
            B,
            C,
            torch.bmm(C, B.mT, out=space(f"products{tag}", len(B), _CHUNK, _CHUNK)),
        )

    def states(self, name: str, chunks: int, block: Block) -> Tensor:
        """Return the buffer `name` [chunks, N, h P]."""
        return self.space(name, chunks, self.B.table.shape[1], block.size * self.x.table.shape[1])


def forward_pass(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, packed: PackedSequence
) -> Tensor:
    """Compute y [1, T, H, P]; arguments as `Source` takes them."""
    source, out = Source(x, dt, A, B, C, D, packed), TokenWriter(x)
    for block in source.blocks():
        state = source.states("state", packed.num_segments, block)
        for window in source.windows:
            values = source.values(block, window)
            chunks = source.chunks(block, window, values)
            read = read_states(chunks, window.steps, state, source.space)
            found = outputs(chunks, read, values, source.D[block.heads], source.space)
            out.write(found, block.heads, window)
    return out.result()


def backward_pass(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    packed: PackedSequence,
    d_out: Tensor,
) -> tuple[Tensor, ...]:
    """Return the gradients of x, dt, A, B, C and D in the shapes of `ssd`'s arguments, given d_out
    [T, H, P].
    """
    source, d_source = Source(x, dt, A, B, C, D, packed), TokenReader(d_out)
    sums = Sums(source, x, dt, B)
    for block in source.blocks():
        states, kept = _retrace(source, block)
        d_state = source.states("d_state", packed.num_segments, block).zero_()
        for window, chunks in zip(reversed(source.windows), reversed(kept), strict=True):
            d_y = d_source.read(block.heads, window, "d_y", source.space, zero_padding=True)
            before = states[window.first :][: window.num_chunks]
            found = gradients(chunks, window.steps, before, d_y, d_state, source.space)
            sums.add(block, window, chunks, found, source.values(block, window), d_y)
    return sums.result(A, B, C, D)


def _retrace(source: Source, block: Block) -> tuple[Tensor, list[Chunks]]:
    """Run the forward scan again; keep the states before each chunk [chunks of all windows, N, h
    P], and everything that does not depend on a state.
    """
    last = source.windows[-1]
    states = source.states("states", last.first + last.num_chunks, block)
    kept = []
    for window in source.windows:
        values = source.values(block, window)
        kept.append(source.chunks(block, window, values, f" {window.first}"))
        keep_states(kept[-1], window.steps, states[window.first :], source.space)
    return states, kept


class Sums:
    """Sums over blocks and windows of the inputs' gradients."""

    def __init__(self, source: Source, x: Tensor, dt: Tensor, B: Tensor) -> None:
        """Begin with zeros."""
        self.source, self.x, self.dt = source, TokenWriter(x), TokenWriter(dt)
        # padding is written to one token past the end
        shape = len(B) + 1, *B.shape[1:]
        self.B, self.C = (B.new_zeros(shape, dtype=source.dtype) for _ in "BC")
        self.A, self.D = torch.zeros_like(source.A), torch.zeros_like(source.D)

    def add(
        self,
        block: Block,
        window: Window,
        chunks: Chunks,
        found: WindowGradients,
        x: Tensor,
        d_y: Tensor,
    ) -> None:
        """Add the gradients of one block and window; its x and the gradient d_y of its output are
        overwritten.
        """
        A, D = (part[block.heads, None, None] for part in (self.source.A, self.source.D))
        d_g = chunks.by_head(found.g[..., None])
        direct = (x * found.u).sum(-1, keepdim=True)
        d_dt = chunks.by_head(direct).addcmul_(d_g, A)
        self.dt.write(d_dt.flatten(0, 1), block.heads, window)
        self.A[block.heads] += (d_g * chunks.by_head(chunks.dt)).sum((0, 2, 3))
        self.D[block.heads] += chunks.by_head(x.mul_(d_y)).sum((0, 2, 3))
        d_x = chunks.by_head(found.u.mul_(chunks.dt)).addcmul_(chunks.by_head(d_y), D)
        self.x.write(d_x.flatten(0, 1), block.heads, window)
        tokens = window.targets.flatten()
        for total, part in ((self.B, found.B), (self.C, found.C)):
            total[:, block.group.start].index_add_(0, tokens, part.flatten(0, 1))

    def result(self, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of x, dt, A, B, C and D, in the inputs' dtypes."""
        d_B, d_C = (total[None, :-1].to(like.dtype) for total, like in ((self.B, B), (self.C, C)))
        d_A, d_D = self.A.to(A.dtype), self.D.to(D.dtype)
        return self.x.result(), self.dt.result(), d_A, d_B, d_C, d_D
