"""What segments need to be walked side by side, in PyTorch, by way of the whole passes: a reference for the kernels'."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_packfree.ops.delta_rule.segments import Segments
from hf_packfree.ops.delta_rule.torch_chunked.passes import backward_pass, forward_pass

Saved = tuple[Tensor, ...]


class TorchScans:
    """See `hf_packfree.ops.delta_rule.segments.Scans`."""

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, segments: Segments) -> Saved:
        """Keep the inputs."""
        return q, k, v, g, beta

    def summarize(self, saved: Saved, segments: Segments) -> tuple[Tensor, Tensor]:
        """The transition is what values of zero leave of the identity."""
        q, k, v, g, beta = saved
        zero = _states(saved, segments)
        identity = torch.eye(k.shape[-1], dtype=zero.dtype, device=k.device).expand(*zero.shape[:2], -1, -1)
        nothing = v.new_zeros(*v.shape[:3], k.shape[-1])
        return self.walk((q, k, nothing, g, beta), identity, segments)[1], self.walk(saved, zero, segments)[1]

    def walk(self, saved: Saved, initial_state: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        """Run the forward pass."""
        with torch.autocast(initial_state.device.type, enabled=False):
            out, final = forward_pass([x[0] for x in saved], saved[0].shape[-1], segments.record, False, initial_state)
        assert final is not None
        return out, final

    def summarize_gradient(self, saved: Saved, d_out: Tensor, segments: Segments) -> Tensor:
        """Run the backward pass from no gradient."""
        zero = _states(saved, segments)
        return self.walk_back(saved, zero, d_out, zero, segments)[-1]

    def walk_back(
        self, saved: Saved, initial_state: Tensor, d_out: Tensor, d_final: Tensor, segments: Segments
    ) -> tuple[Tensor, ...]:
        """Run the backward pass."""
        inputs, size = [x[0] for x in saved], saved[0].shape[-1]
        with torch.autocast(d_out.device.type, enabled=False):
            found = backward_pass(inputs, d_out[0], size, segments.record, False, initial_state, d_final)
        return found  # type: ignore[return-value]


def _states(saved: Saved, segments: Segments) -> Tensor:
    """Zero for every segment."""
    q, _, v, *_ = saved
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return v.new_zeros(segments.record.num_segments, v.shape[2], q.shape[3], v.shape[3], dtype=dtype)
