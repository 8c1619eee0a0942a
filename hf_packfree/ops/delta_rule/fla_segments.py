"""`segments.Scans`, by which segments are walked in parallel, on flash-linear-attention's public
function alone.

Shapes: T tokens, S segments, H key heads, HV value heads, K and V head sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_packfree.ops.delta_rule.fla import with_states
from hf_packfree.ops.delta_rule.segments import Segments
from hf_packfree.packing import PackedSequence

Saved = tuple[Tensor, ...]


class FLAScans:
    """See `hf_packfree.ops.delta_rule.segments.Scans`: each method is a pass of FLA over the
    segments, and the backward ones run FLA's forward pass again.

    Only the segments from the first to the last with nonzero `Segments.chunks` are summarized;
    results of the others are zero.
    """

    def prepare(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, segments: Segments
    ) -> Saved:
        """Keep the inputs."""
        return q, k, v, g, beta

    def summarize(self, saved: Saved, segments: Segments) -> tuple[Tensor, Tensor]:
        """Run FLA with values [v, 0] from the states [0, I]: the final states are [B, M]."""
        size, part = saved[1].shape[-1], _Part(segments, reverse=False)
        q, k, v, g, beta = map(part.tokens, saved)
        zero = _states(v, size, part.record)
        identity = torch.eye(size, device=v.device).expand(*zero.shape[:2], -1, -1)
        _, final = with_states(
            q, k, F.pad(v, (0, size)), g, beta, torch.cat([zero, identity], -1), part.record, False
        )
        addend, transition = final.split([v.shape[-1], size], -1)
        return part.of_all(transition), part.of_all(addend)

    def walk(self, saved: Saved, initial_state: Tensor, segments: Segments) -> Tensor:
        """Run the forward pass."""
        q, k, v, g, beta = saved
        return with_states(q, k, v, g, beta, initial_state, segments.record, False)[0]

    def summarize_gradient(self, saved: Saved, d_out: Tensor, segments: Segments) -> Tensor:
        """Run the backward pass with zero as the gradient of the final states: that of the initial
        states is C.
        """
        part = _Part(segments, reverse=True)
        mine, zero = (
            tuple(map(part.tokens, saved)),
            _states(saved[2], saved[1].shape[-1], part.record),
        )
        return part.of_all(_gradients(mine, zero, part.tokens(d_out), zero, part.record)[-1])

    def walk_back(
        self,
        saved: Saved,
        initial_state: Tensor,
        d_out: Tensor,
        d_final: Tensor,
        segments: Segments,
    ) -> tuple[Tensor, ...]:
        """Run the backward pass."""
        return _gradients(saved, initial_state, d_out, d_final, segments.record)


class _Part:
    """The segments from the first to the last that are to be summarized, as a row of their own."""

    def __init__(self, segments: Segments, *, reverse: bool) -> None:
        numbers = segments.chunks_cpu[int(reverse)].nonzero()[:, 0].tolist()
        self.first, self.end, self.count = numbers[0], numbers[-1] + 1, segments.record.num_segments
        self.bounds = segments.record.cu_seqlens_cpu[[self.first, self.end]].tolist()
        self.record = segments.record.cached(_record_of, self.first, self.end)

    def tokens(self, x: Tensor) -> Tensor:
        """Return these segments' tokens of x [1, T, ...]."""
        return x[:, slice(*self.bounds)]

    def of_all(self, found: Tensor) -> Tensor:
        """Return `found` of these segments as [S, ...], with zeros for the others."""
        return F.pad(found, (0, 0) * (found.ndim - 1) + (self.first, self.count - self.end))


def _record_of(packed: PackedSequence, first: int, end: int) -> PackedSequence:
    return PackedSequence.from_lengths(packed.lengths[first:end], device=packed.seq_idx.device)


def _states(v: Tensor, size: int, record: PackedSequence) -> Tensor:
    """Return zero states [segments, HV, size, V], fp32."""
    return v.new_zeros(record.num_segments, v.shape[2], size, v.shape[3], dtype=torch.float32)


def _gradients(
    saved: Saved, initial_state: Tensor, d_out: Tensor, d_final: Tensor, record: PackedSequence
) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        q, k, v, g, beta, state = leaves = [
            x.detach().requires_grad_() for x in (*saved, initial_state)
        ]
        outputs = with_states(q, k, v, g, beta, state, record, False)
    return torch.autograd.grad(outputs, leaves, (d_out, d_final))
