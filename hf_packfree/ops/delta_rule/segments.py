"""Long documents cut into segments that are walked in parallel, exactly.

A delta rule carries its state from chunk to chunk, so that a document alone keeps one program per
head busy. But a segment of a document maps the state before it to the state after it affinely,

    S' = M S + B,    and the gradient of the states    dS = M^T dS' + C,

where M [K, K] is the segment's transition, B its final state from a zero state, and C the gradient
of the state before it if its final state has none. None of them needs a state, so they are computed
for all segments at once (`Scans`) and folded to the state that each segment begins with (`fold`);
then all segments are walked at once. Nothing is dropped, however much decayed.

Shapes: T tokens, N documents, S segments, H key heads, HV value heads, K and V head sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from math import ceil
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.ops.backend import block_width
from hf_packfree.ops.fla_support import CHUNK
from hf_packfree.ops.launch import launch
from hf_packfree.packing import PackedSequence

# fewest chunks of a document that is cut
_SHORTEST = 64
# most segments of a row, as a multiple of those that run in parallel: the states of all are kept
_MOST = 8
# time for M, B and C of a chunk, as a fraction of the time to walk a chunk
SUMMARY_COST = 0.4
# time to fold a segment, as a fraction of the time to walk a chunk
FOLD_COST = 0.5
# numbers of segments that are tried, as multiples of those that run in parallel
_ROUNDS = (0.25, 0.5, 1, 2, 3)
GAIN = 0.95
# columns of a state in one program of the fold, whose steps take a few microseconds each
_COLUMNS = 32
_WARPS = 8


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of a row's documents.

    Attributes:
        record: of the segments.
        firsts: int32 [N+1] on the row's device, each document's first segment, and the number of
            all documents' segments: S, or less where a bounded row ends in empty ones.
        chunks: int32 [2, S] on the row's device, the number of chunks of each segment: in row 0 for
            segments that another of their document follows, in row 1 for those that follow another;
            else 0.
        on_host: the same on the host; None where the row's record is bounded.
    """

    record: PackedSequence
    firsts: Tensor
    chunks: Tensor
    on_host: Tensor | None = None

    @classmethod
    def of(cls, packed: PackedSequence, pieces: Sequence[Sequence[int]]) -> Segments:
        """Build the segments from the lengths of each document's segments, in tokens.

        All lengths but a document's last are multiples of `CHUNK`, so that segments begin where
        chunks do.
        """
        device = packed.cu_seqlens.device
        firsts = torch.tensor([0, *map(len, pieces)]).cumsum(0)
        record = PackedSequence.from_lengths(
            [length for lengths in pieces for length in lengths], device=device
        )
        chunks = -(-record.cu_seqlens_cpu.diff() // CHUNK).expand(2, -1).contiguous()
        chunks[0, firsts[1:] - 1] = 0
        chunks[1, firsts[:-1]] = 0
        first, table = (x.to(device, non_blocking=True) for x in (firsts.int(), chunks))
        return cls(record, first, table, chunks)

    def continued(self, before: bool, after: bool) -> Segments:
        """Return the segments of a row that is part of a longer one.

        Args:
            before: the first document began before the row.
            after: the last document goes on after it.
        """
        table, sizes = self.chunks_cpu.clone(), -(-self.record.cu_seqlens_cpu.diff() // CHUNK)
        table[0, -1] = sizes[-1] if after else 0
        table[1, 0] = sizes[0] if before else 0
        return replace(self, chunks=table.to(self.chunks.device, non_blocking=True), on_host=table)

    @property
    def chunks_cpu(self) -> Tensor:
        """`chunks` on the host."""
        assert self.on_host is not None, "the host does not know a bounded row's documents"
        return self.on_host

    def are_cut(self, packed: PackedSequence) -> bool:
        """Whether any document of the row has several segments."""
        return self.record.num_segments > packed.num_segments

    def of_first(self) -> slice:
        """Return which segments are of the row's first document."""
        ends = (self.chunks_cpu[0] == 0).nonzero()[:, 0].tolist()
        return slice(0, ends[0] + 1 if ends else self.record.num_segments)

    def of_last(self) -> slice:
        """Return which segments are of the row's last document."""
        starts = (self.chunks_cpu[1] == 0).nonzero()[:, 0].tolist()
        return slice(starts[-1] if starts else 0, self.record.num_segments)

    def scanned(self, heads: int, *, reverse: bool = False) -> Tensor:
        """Return row 0 of `chunks`, or in reverse row 1, for every head: int32 [S, HV]."""
        return self.chunks[int(reverse), :, None].expand(-1, heads).contiguous()


def plan_segments(packed: PackedSequence, parallel: int) -> Segments | None:
    """Cut documents into segments where that is expected to be faster. None: no document is cut.

    Args:
        packed: the documents.
        parallel: how many segments run at once, each with all of its heads.
    """
    chunks = [-(-length // CHUNK) for length in packed.lengths]
    longest, share = max(chunks), sum(chunks) / parallel
    if longest < _SHORTEST or longest <= share or len(chunks) >= _MOST * parallel:
        return None
    best, found = GAIN * makespan(chunks, parallel), None
    for rounds in _ROUNDS:
        parts = [_even(count, ceil(share / rounds)) for count in chunks]
        time = _time(parts, parallel)
        if time < best and sum(map(len, parts)) <= _MOST * parallel:
            best, found = time, parts
    return None if found is None else Segments.of(packed, list(map(_tokens, packed.lengths, found)))


def _time(parts: Sequence[Sequence[int]], parallel: int) -> float:
    """Return the time, in chunks, to walk each document's parts, and to summarize and fold those of
    documents with several.
    """
    cut = [part for document in parts if len(document) > 1 for part in document]
    walk, summary = (
        makespan(chunks, parallel)
        for chunks in ([part for document in parts for part in document], cut)
    )
    return walk + SUMMARY_COST * summary + FOLD_COST * max(map(len, parts))


def makespan(sizes: Sequence[int], parallel: int) -> float:
    """Return when the last of some programs of these sizes ends, if `parallel` of them run at a
    time and start in order.
    """
    ends = [0.0] * parallel
    heapify(ends)
    for size in sizes:
        heapreplace(ends, ends[0] + size)
    return max(ends)


def _even(count: int, bound: int) -> list[int]:
    """Cut `count` chunks into the fewest parts of at most `bound` chunks, as even as possible."""
    if count < _SHORTEST:
        return [count]
    parts = -(-count // bound)
    return [count // parts + (number < count % parts) for number in range(parts)]


def _tokens(length: int, parts: Sequence[int]) -> list[int]:
    """Return the parts of a document in tokens, given them in chunks; the document's last chunk may
    be shorter.
    """
    sizes = [part * CHUNK for part in parts]
    sizes[-1] -= sum(sizes) - length
    return sizes


class Scans(Protocol):
    """A backend's functions to walk segments in parallel; none is differentiable.

    States, transitions and their gradients are fp32 (fp64 where q is), [S, HV, K, V] or [S, HV, K,
    K].
    """

    def prepare(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, segments: Segments
    ) -> tuple[Tensor, ...]:
        """Return the tensors that the other methods read and the backward pass keeps, each [1, T,
        ...]; q and k have norm 1.
        """

    def summarize(self, saved: tuple[Tensor, ...], segments: Segments) -> tuple[Tensor, Tensor]:
        """Return M and B of every segment; those of a document's last segment are not used."""

    def walk(self, saved: tuple[Tensor, ...], initial_state: Tensor, segments: Segments) -> Tensor:
        """Return the output [1, T, HV, V], given the state before every segment."""

    def summarize_gradient(
        self, saved: tuple[Tensor, ...], d_out: Tensor, segments: Segments
    ) -> Tensor:
        """Return C of every segment; that of a document's first segment is not used."""

    def walk_back(
        self,
        saved: tuple[Tensor, ...],
        initial_state: Tensor,
        d_out: Tensor,
        d_final: Tensor,
        segments: Segments,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v, g, beta, and of the state before every segment."""


def fold(
    transition: Tensor,
    addend: Tensor,
    given: Tensor | None,
    firsts: Tensor,
    *,
    reverse: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Return the state before every segment, by S' = M S + B; or, in reverse, the gradient of the
    state after every segment, by M^T S + B.

    Args:
        transition: M [S, HV, K, K], fp32 or fp64.
        addend: B [S, HV, K, V], of the same dtype.
        given: [N, HV, K, V], the state before every document, or in reverse the gradient of the
            state after it; None: zero.
        firsts: see `Segments`.
        reverse: from each document's last segment to its first.
        backend: "triton" or "torch"; "auto": Triton on CUDA.

    Returns:
        [S, HV, K, V] of that dtype; without values for segments that no document has.
    """
    if backend == "triton" or (
        backend == "auto" and addend.is_cuda and addend.dtype == torch.float32
    ):
        return _fold_triton(transition, addend, given, firsts, reverse)
    out = torch.empty_like(addend)
    offsets = firsts.tolist()
    for document, (first, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        state = torch.zeros_like(addend[0]) if given is None else given[document].to(addend.dtype)
        for segment in reversed(range(first, end)) if reverse else range(first, end):
            out[segment] = state
            state = (transition[segment].mT if reverse else transition[segment]) @ state + addend[
                segment
            ]
    return out


def _fold_triton(
    transition: Tensor, addend: Tensor, given: Tensor | None, firsts: Tensor, reverse: bool
) -> Tensor:
    from hf_packfree.ops.delta_rule.triton_kernels import fold_states

    transition, addend = transition.contiguous(), addend.contiguous()
    given = given if given is None else given.to(addend.dtype).contiguous()
    out = torch.empty_like(addend)
    _, heads, keys, values = addend.shape
    grid = len(firsts) - 1, heads, -(-values // _COLUMNS)
    launch(
        fold_states,
        grid,
        transition,
        addend,
        given,
        firsts,
        out,
        HEADS=heads,
        K=keys,
        V=values,
        BLOCK_K=block_width(max(keys, 16)),
        COLUMNS=_COLUMNS,
        REVERSE=reverse,
        num_warps=_WARPS,
    )
    return out


def walk_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    segments: Segments,
    scans: Scans,
) -> Tensor:
    """Run the gated delta rule on documents cut into segments; differentiable.

    Args:
        q, k, v, g, beta: see `hf_packfree.ops.delta_rule.gated_delta_rule`; q and k have norm 1.
        segments: of the documents.
        scans: of the backend.

    Returns:
        [1, T, HV, V].
    """
    return _Walk.apply(q, k, v, g, beta, segments, scans)  # type: ignore[no-any-return]


class _Walk(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        segments: Segments,
        scans: Scans,
    ) -> Tensor:
        saved = scans.prepare(q, k, v, g, beta, segments)
        transition, addend = scans.summarize(saved, segments)
        before = fold(transition, addend, None, segments.firsts)
        ctx.save_for_backward(*saved, transition, before)
        ctx.plan = segments, scans
        return scans.walk(saved, before, segments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        *saved, transition, before = ctx.saved_tensors
        segments, scans = ctx.plan
        d_out = d_out.contiguous()
        addend = scans.summarize_gradient(saved, d_out, segments)
        d_after = fold(transition, addend, None, segments.firsts, reverse=True)
        *gradients, _ = scans.walk_back(saved, before, d_out, d_after, segments)
        return *gradients, None, None
