"""The gated delta rule over packed documents in PyTorch: chunked, exact at boundaries, light on
memory.

Nothing but the inputs is saved for the backward pass, which recomputes the forward's intermediates,
one block of heads at a time. Every product is a batched one over (chunk, head), which on the CPU
gives each chunk the same result whatever else is in the batch: a document's output is
batch-invariant.

Shapes: T tokens, H key heads, HV value heads, K and V head sizes.  Formulas: see `chunks.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.ops.chunked.layout import widen
from hf_packfree.ops.delta_rule.segments import Segments
from hf_packfree.ops.delta_rule.torch_chunked.passes import backward_pass, forward_pass
from hf_packfree.packing import PackedSequence, uncompiled

Saved = tuple[Tensor, ...]


@uncompiled
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    packed: PackedSequence,
    qk_l2norm: bool = True,
) -> Tensor:
    """See `hf_packfree.ops.delta_rule.gated_delta_rule`."""
    key_size, value_size = q.shape[-1], v.shape[-1]
    q, k, v = widen(q), widen(k), widen(v)
    out: Tensor
    out, _ = _GatedDeltaRule.apply(q, k, v, g, beta, None, key_size, packed, qk_l2norm)
    return out if out.shape[-1] == value_size else out[..., :value_size]


@uncompiled
def with_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    packed: PackedSequence,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    """See `hf_packfree.ops.delta_rule.gated_delta_rule_with_states`."""
    key_size, value_size = q.shape[-1], v.shape[-1]
    q, k, v, state = widen(q), widen(k), widen(v), widen(widen(initial_state).mT).mT
    out, final = _GatedDeltaRule.apply(q, k, v, g, beta, state, key_size, packed, qk_l2norm)
    return out[..., :value_size], final[..., :key_size, :value_size]


class _GatedDeltaRule(Function):
    """Returns the output, and the final states where there are initial states."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        size: int,
        packed: PackedSequence,
        qk_l2norm: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(q, k, v, g, beta, initial_state)
        ctx.size, ctx.packed, ctx.qk_l2norm = size, packed, qk_l2norm
        # autocast would round the products to half precision
        with torch.autocast(q.device.type, enabled=False):
            return forward_pass(
                (q[0], k[0], v[0], g[0], beta[0]), size, packed, qk_l2norm, initial_state
            )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        arguments = (d_out, d_final, *ctx.saved_tensors, ctx.size, ctx.packed, ctx.qk_l2norm)
        return *_backward(*arguments), None, None, None


def _backward(
    d_out: Tensor,
    d_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    size: int,
    packed: PackedSequence,
    qk_l2norm: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, g, beta and of the initial state."""
    with torch.autocast(d_out.device.type, enabled=False):
        inputs = (q[0], k[0], v[0], g[0], beta[0])
        return backward_pass(inputs, d_out[0], size, packed, qk_l2norm, initial_state, d_final)


class TorchScans:
    """`hf_packfree.ops.delta_rule.segments.Scans` in PyTorch, by the forward and backward passes
    over all segments.
    """

    def prepare(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, segments: Segments
    ) -> Saved:
        """Keep the inputs."""
        return q, k, v, g, beta

    def summarize(self, saved: Saved, segments: Segments) -> tuple[Tensor, Tensor]:
        """B is the final state from zero; M is the final state from the identity with values of
        zero.
        """
        q, k, v, g, beta = saved
        zero = _states(saved, segments)
        identity = torch.eye(k.shape[-1], dtype=zero.dtype, device=k.device).expand(
            *zero.shape[:2], -1, -1
        )
        nothing = v.new_zeros(*v.shape[:3], k.shape[-1])
        _, transition = _pass((q, k, nothing, g, beta), identity, segments)
        _, addend = _pass(saved, zero, segments)
        return transition, addend

    def walk(self, saved: Saved, initial_state: Tensor, segments: Segments) -> Tensor:
        """Run the forward pass."""
        return _pass(saved, initial_state, segments)[0]

    def summarize_gradient(self, saved: Saved, d_out: Tensor, segments: Segments) -> Tensor:
        """Run the backward pass with zero as the gradient of the final states: that of the initial
        states is C.
        """
        zero = _states(saved, segments)
        return self.walk_back(saved, zero, d_out, zero, segments)[-1]

    def walk_back(
        self,
        saved: Saved,
        initial_state: Tensor,
        d_out: Tensor,
        d_final: Tensor,
        segments: Segments,
    ) -> tuple[Tensor, ...]:
        """Run the backward pass."""
        inputs, size = [x[0] for x in saved], saved[0].shape[-1]
        with torch.autocast(d_out.device.type, enabled=False):
            found = backward_pass(
                inputs, d_out[0], size, segments.record, False, initial_state, d_final
            )
        return found  # type: ignore[return-value]


def _pass(saved: Saved, initial_state: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Return the output of the forward pass, and the state after every segment."""
    with torch.autocast(initial_state.device.type, enabled=False):
        out, final = forward_pass(
            [x[0] for x in saved], saved[0].shape[-1], segments.record, False, initial_state
        )
    assert final is not None
    return out, final


def _states(saved: Saved, segments: Segments) -> Tensor:
    """Return zero states for every segment."""
    q, _, v, *_ = saved
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return v.new_zeros(
        segments.record.num_segments, v.shape[2], q.shape[3], v.shape[3], dtype=dtype
    )
