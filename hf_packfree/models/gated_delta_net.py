"""Gated DeltaNet over a packed row: the convolution and the state stop at every document's edge.

Shapes: T tokens of the row, C channels (q, k and v side by side), H key heads, HV value heads, K
and V their sizes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from hf_packfree.models.base import Replacement, Sizes, size_of, size_of_linear, size_of_norm
from hf_packfree.models.conv_weights import conv_weights_in_place, refuse_adapters
from hf_packfree.models.fusable import epsilon, is_hooked, plain_layers, project
from hf_packfree.models.rematerialize import linear_with_recompute
from hf_packfree.models.state import Kernels, PatchState, receive, state_of
from hf_packfree.ops.conv_delta_rule import conv_delta_rule
from hf_packfree.ops.fused import OP as FUSED
from hf_packfree.ops.fused import gated_rms_norm, gates
from hf_packfree.packing import PackedSequence
from hf_packfree.parallel.delta_rule import SHARED


class PackedGatedDeltaNet(Replacement):
    """Put in front of a family's Gated DeltaNet: owns the packed branch, leaves everything else
    to upstream.
    """

    follows_trees = True

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Mix tokens within documents when a record comes down, as upstream otherwise.

        Args:
            hidden_states: [1, T, D_model] of a packed row, [B, S, D_model] otherwise.

        Raises:
            PatchConflict: an adapter was put on the convolution.
        """
        refuse_adapters(self.conv1d)
        packed = receive(self, kwargs)
        if packed is None:
            return super().forward(hidden_states, *args, **kwargs)
        with conv_weights_in_place(self.conv1d):
            return packed.zero_left_pad(self._mix(hidden_states, packed))

    def _mix(self, x: Tensor, packed: PackedSequence) -> Tensor:
        state = state_of(self)
        mixed, z, b, a = self._project(x, state)
        # which under autocast is not x's
        kernels = state.kernels_for(mixed.device, mixed.dtype)
        gated_norm = self.norm
        # upstream's, or whatever has replaced it
        by_module = kernels["fused"] == "torch" or is_hooked(gated_norm)
        g, beta = gates(a, b, self.A_log, self.dt_bias, backend=kernels["fused"])
        out = self._conv_delta_rule(mixed, g, beta, packed, kernels, state)
        if by_module:
            normed = gated_norm(out.reshape(-1, self.head_v_dim), z.reshape(-1, self.head_v_dim))
            normed = normed.view(1, packed.num_tokens, self.value_dim)
            return project(normed, self.out_proj, state=state)[0]
        norm = partial(
            gated_rms_norm,
            out,
            z,
            gated_norm.weight,
            epsilon(gated_norm),
            batch_invariant=state.batch_invariant,
            backend=kernels["fused"],
        )
        fused = FUSED.backend(kernels["fused"]).recomputes
        return linear_with_recompute(
            norm, self.out_proj, out, fused=fused, recompute=True, state=state
        )

    def _conv_delta_rule(
        self,
        mixed: Tensor,
        g: Tensor,
        beta: Tensor,
        packed: PackedSequence,
        kernels: Kernels,
        state: PatchState,
    ) -> Tensor:
        weight, bias = self.conv1d.weight, self.conv1d.bias
        heads, sizes = (self.num_k_heads, self.num_v_heads), (self.head_k_dim, self.head_v_dim)
        alone: Any = partial(conv_delta_rule, batch_invariant=state.batch_invariant)
        run = alone if state.context_parallel is None else SHARED[state.context_parallel.gdn]
        return run(
            mixed,
            weight,
            g,
            beta,
            packed,
            heads,
            sizes,
            bias=bias,
            activation=self.activation,
            conv=kernels["conv"],
            delta_rule=kernels["delta_rule"],
        )

    def _project(self, x: Tensor, state: PatchState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q|k|v [1, T, C], the output gate z [1, T, HV*V], and b, a [1, T, HV], from the
        family's own layout.
        """
        raise NotImplementedError

    def calls(self, name: str, part: nn.Module, x: Tensor) -> bool:
        """Whether the packed branch calls this part: a projection that is more than its weight,
        or a norm with hooks.
        """
        if name == "norm":
            return is_hooked(part)
        return "proj" in name and plain_layers(x, part, adapters=False) is None

    @staticmethod
    def op_sizes(layer: Any) -> dict[str, int]:
        """Return heads, their sizes and the convolution's width."""
        return {
            "key_heads": layer.num_k_heads,
            "value_heads": layer.num_v_heads,
            "key_size": layer.head_k_dim,
            "value_size": layer.head_v_dim,
            "taps": layer.conv_kernel_size,
        }

    @staticmethod
    def checkpoint_sizes(layer: Any) -> Sizes:
        """Return what the packed branch reads, as found and as the module's own head counts say."""
        channels = 2 * layer.num_k_heads * layer.head_k_dim + layer.num_v_heads * layer.head_v_dim
        values = layer.num_v_heads * layer.head_v_dim
        return {
            "conv1d": (type(layer.conv1d), nn.Conv1d),
            "conv1d.weight": (size_of(layer.conv1d.weight), (channels, 1, layer.conv_kernel_size)),
            "A_log": (size_of(layer.A_log), (layer.num_v_heads,)),
            "dt_bias": (size_of(layer.dt_bias), (layer.num_v_heads,)),
            "norm": (size_of_norm(layer.norm), (layer.head_v_dim,)),
            "out_proj": (size_of_linear(layer.out_proj), (layer.hidden_size, values)),
            "activation": (layer.activation in ("silu", "swish"), True),
            "grouped heads": (layer.num_v_heads % layer.num_k_heads, 0),
        }
