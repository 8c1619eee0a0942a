"""Gated DeltaNet over a packed row: the convolution and the state stop at every document's edge.

Shapes: T tokens of the row, C channels (q, k and v side by side), H key heads, HV value heads, K
and V their sizes.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_packfree.models.base import Sizes, silu, size_of, size_of_linear, size_of_norm
from hf_packfree.models.conv_mixer import ConvMixer
from hf_packfree.models.plain_layers import epsilon, is_gated_norm, plain_layers, project
from hf_packfree.models.recompute import linear_with_recompute
from hf_packfree.models.state import Kernels, PatchState, state_of
from hf_packfree.ops.conv_delta_rule import conv_delta_rule
from hf_packfree.ops.fused import gated_rms_norm, gates
from hf_packfree.packing import PackedSequence


class PackedGatedDeltaNet(ConvMixer):
    """Put in front of a family's Gated DeltaNet: has the packed branch, and leaves everything else
    to upstream.
    """

    endings = ("GatedDeltaNet",)
    follows_trees = True
    norm_name: ClassVar[str] = "norm"
    output_name: ClassVar[str] = "out_proj"
    """The attributes of the norm and the output projection, which follow the delta rule."""

    def _mix(self, x: Tensor, packed: PackedSequence) -> Tensor:
        state = state_of(self)
        mixed, z, b, a = self._project(x, state)
        # under autocast the projections' dtype is not x's
        kernels = state.kernels_for(mixed.device, mixed.dtype)
        # upstream's modules, or modules that replaced them
        gated_norm, output = getattr(self, self.norm_name), getattr(self, self.output_name)
        by_module = kernels["fused"] == "torch" or not is_gated_norm(gated_norm, self)
        g, beta = self._gates(a, b, kernels)
        out = self._conv_delta_rule(mixed, g, beta, packed, kernels)
        if by_module:
            normed = gated_norm(out.reshape(-1, self.head_v_dim), z.reshape(-1, self.head_v_dim))
            normed = normed.view(1, packed.num_tokens, self.value_dim)
            return project(normed, output, state=state)[0]
        norm = partial(
            gated_rms_norm,
            out,
            z,
            gated_norm.weight,
            epsilon(gated_norm),
            backend=kernels["fused"],
        )
        return linear_with_recompute(
            norm, output, out, backend=kernels["fused"], recompute=True, state=state
        )

    def _gates(self, a: Tensor, b: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor]:
        """Return g, the log decay, and beta, the write strength, [1, T, HV] each, from the
        projections a and b [1, T, HV].
        """
        return gates(a, b, self.A_log, self.dt_bias, backend=kernels["fused"])

    def _conv_delta_rule(
        self,
        mixed: Tensor,
        g: Tensor,
        beta: Tensor,
        packed: PackedSequence,
        kernels: Kernels,
    ) -> Tensor:
        return conv_delta_rule(
            mixed,
            self.conv1d.weight,
            g,
            beta,
            packed,
            (self.num_k_heads, self.num_v_heads),
            (self.head_k_dim, self.head_v_dim),
            bias=self.conv1d.bias,
            activation=self.activation,
            conv=kernels["conv"],
            delta_rule=kernels["delta_rule"],
        )

    def _project(self, x: Tensor, state: PatchState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q|k|v [1, T, C], the output gate z [1, T, HV*V], and b and a [1, T, HV], whatever
        the layout of the family's projections.
        """
        raise NotImplementedError

    def calls(self, name: str, part: nn.Module, x: Tensor) -> bool:
        """Whether the packed branch calls a projection or a norm instead of reading its weight: a
        projection with a bias, hooks or adapters, for instance, or a norm with hooks.
        """
        if name == self.norm_name:
            return not is_gated_norm(part, self)
        return "proj" in name and plain_layers(x, part, adapters=False) is None

    @staticmethod
    def op_sizes(layer: Any) -> dict[str, int]:
        """Return the numbers of heads, the sizes of a head and the convolution's width."""
        return {
            "key_heads": layer.num_k_heads,
            "value_heads": layer.num_v_heads,
            "key_size": layer.head_k_dim,
            "value_size": layer.head_v_dim,
            "taps": layer.conv_kernel_size,
        }

    @classmethod
    def checkpoint_sizes(cls, layer: Any) -> Sizes:
        """Return the sizes of the parameters, as found and as the module's numbers of heads say."""
        norm, output = getattr(layer, cls.norm_name), getattr(layer, cls.output_name)
        channels = 2 * layer.num_k_heads * layer.head_k_dim + layer.num_v_heads * layer.head_v_dim
        values = layer.num_v_heads * layer.head_v_dim
        return {
            "conv1d": (type(layer.conv1d), nn.Conv1d),
            "conv1d.weight": (size_of(layer.conv1d.weight), (channels, 1, layer.conv_kernel_size)),
            "A_log": (size_of(layer.A_log), (layer.num_v_heads,)),
            "dt_bias": (size_of(layer.dt_bias), (layer.num_v_heads,)),
            cls.norm_name: (size_of_norm(norm), (layer.head_v_dim,)),
            cls.output_name: (size_of_linear(output), (layer.hidden_size, values)),
            "activation": silu(layer.activation),
            "grouped heads": (layer.num_v_heads % layer.num_k_heads, 0),
        }


class SplitProjections(PackedGatedDeltaNet):
    """Qwen3.5's layout: one projection for q, k and v, and one each for z, b and a."""

    inputs = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"

    def _project(self, x: Tensor, state: PatchState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layers = self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a
        qkv, z, b, a = project(x, *layers, state=state)
        return qkv, z, b, a

    @staticmethod
    def checkpoint_sizes(layer: Any) -> Sizes:
        """Add the sizes of the four projections to those of every Gated DeltaNet."""
        values, hidden = layer.num_v_heads * layer.head_v_dim, layer.hidden_size
        channels = 2 * layer.num_k_heads * layer.head_k_dim + values
        return PackedGatedDeltaNet.checkpoint_sizes(layer) | {
            "in_proj_qkv": (size_of_linear(layer.in_proj_qkv), (channels, hidden)),
            "in_proj_z": (size_of_linear(layer.in_proj_z), (values, hidden)),
            "in_proj_b": (size_of_linear(layer.in_proj_b), (layer.num_v_heads, hidden)),
            "in_proj_a": (size_of_linear(layer.in_proj_a), (layer.num_v_heads, hidden)),
        }


class SeparateProjections(PackedGatedDeltaNet):
    """OLMo Hybrid's layout: one projection each for q, k, v, z, b and a. With `allow_neg_eigval`
    beta is doubled, so that the state may change its sign.
    """

    endings = ("HybridGatedDeltaNet",)
    norm_name = "o_norm"
    output_name = "o_proj"
    inputs = "q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"

    def _project(self, x: Tensor, state: PatchState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layers = (getattr(self, name) for name in self.inputs)
        q, k, v, z, b, a = project(x, *layers, state=state)
        return torch.cat([q, k, v], -1), z, b, a

    def _gates(self, a: Tensor, b: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor]:
        g, beta = super()._gates(a, b, kernels)
        return g, 2 * beta if self.allow_neg_eigval else beta

    @classmethod
    def checkpoint_sizes(cls, layer: Any) -> Sizes:
        """Add the sizes of the six projections to those of every Gated DeltaNet."""
        keys, values = layer.num_k_heads * layer.head_k_dim, layer.num_v_heads * layer.head_v_dim
        widths = keys, keys, values, values, layer.num_v_heads, layer.num_v_heads
        return super().checkpoint_sizes(layer) | {
            name: (size_of_linear(getattr(layer, name)), (width, layer.hidden_size))
            for name, width in zip(cls.inputs, widths, strict=True)
        }
