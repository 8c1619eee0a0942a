"""Mamba-2 over a packed row: the convolution and the state stop at every document's edge.

Shapes: T tokens of the row, H heads of P channels, G groups with states of N, C channels of the
convolution: x [H, P], B and C [G, N], side by side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_packfree.models.base import Sizes, silu, size_of, size_of_linear, size_of_norm
from hf_packfree.models.conv_mixer import ConvMixer
from hf_packfree.models.state import state_of
from hf_packfree.ops.conv import causal_conv1d
from hf_packfree.ops.ssd import ssd
from hf_packfree.packing import PackedSequence


class PackedMamba2(ConvMixer):
    """Put in front of a family's Mamba-2: has the packed branch, and leaves everything else to
    upstream.

    In training, upstream runs one kernel for convolution, state, norm and output projection, which
    reads weights without their adapters. The packed branch runs instead of that kernel, and calls
    the modules.
    """

    endings = "MambaLayer", "Mixer"

    def _mix(self, hidden_states: Tensor, packed: PackedSequence) -> Tensor:
        state, sizes = state_of(self), (self.intermediate_size, self.conv_dim, self.num_heads)
        gate, mixed, dt = self._project(hidden_states).split(sizes, -1)
        kernels = state.kernels_for(mixed.device, mixed.dtype)
        mixed = causal_conv1d(
            mixed,
            self.conv1d.weight.squeeze(1),
            packed,
            bias=self.conv1d.bias,
            activation=self.activation,
            backend=kernels["conv"],
        )
        grouped = self.n_groups * self.ssm_state_size
        x, B, C = mixed.split((self.intermediate_size, grouped, grouped), -1)
        out = ssd(
            x.unflatten(-1, (self.num_heads, self.head_dim)),
            self._steps(dt),
            -self.A_log.float().exp(),
            B.unflatten(-1, (self.n_groups, self.ssm_state_size)),
            C.unflatten(-1, (self.n_groups, self.ssm_state_size)),
            self.D,
            packed,
            backend=kernels["ssd"],
        )
        normed = self._normalise(out.flatten(2), gate)
        return self.out_proj(normed.to(hidden_states.dtype))

    def _project(self, hidden_states: Tensor) -> Tensor:
        """Return gate | x, B, C | dt [1, T, H P + C + H]; Falcon-H1 scales the projection's input
        and output.
        """
        if not hasattr(self, "mup_vector"):
            return self.in_proj(hidden_states)
        projected: Tensor = self.in_proj(hidden_states * self.ssm_in_multiplier)
        return projected * self.mup_vector

    def _steps(self, dt: Tensor) -> Tensor:
        """Return the step sizes from dt [1, T, H], in fp32 (fp64 from fp64), as upstream's kernels
        compute them.
        """
        wide = torch.promote_types(dt.dtype, torch.float32)
        steps = F.softplus(dt.to(wide) + self.dt_bias.to(wide))
        return steps.clamp(*self.time_step_limit)

    def _normalise(self, out: Tensor, gate: Tensor) -> Tensor:
        """Gate and normalise the output by upstream's norm; without a norm, as in some of
        Falcon-H1's models, only gate.
        """
        if isinstance(self.norm, nn.Identity):
            return out * F.silu(gate)
        return self.norm(out, gate)

    @staticmethod
    def op_sizes(layer: Any) -> dict[str, int]:
        """Return the convolution's width and channels."""
        return {"taps": layer.conv_kernel_size, "channels": layer.conv_dim}

    @staticmethod
    def checkpoint_sizes(layer: Any) -> Sizes:
        """Return the sizes of the parameters, as found and as the module's numbers of heads say."""
        heads, values = layer.num_heads, layer.num_heads * layer.head_dim
        channels = values + 2 * layer.n_groups * layer.ssm_state_size
        has_norm = not isinstance(layer.norm, nn.Identity)
        return {
            "conv1d": (type(layer.conv1d), nn.Conv1d),
            "conv1d.weight": (size_of(layer.conv1d.weight), (channels, 1, layer.conv_kernel_size)),
            "A_log": (size_of(layer.A_log), (heads,)),
            "D": (size_of(layer.D), (heads,)),
            "dt_bias": (size_of(layer.dt_bias), (heads,)),
            "in_proj": (size_of_linear(layer.in_proj)[0], values + channels + heads),
            "norm": (size_of_norm(layer.norm) if has_norm else (values,), (values,)),
            "out_proj": (size_of_linear(layer.out_proj), (layer.hidden_size, values)),
            "activation": silu(layer.activation),
            "grouped heads": (heads % layer.n_groups, 0),
        }
