"""Kimi Delta Attention over a packed row: the convolution and the state stop at every document's
edge.

Shapes: T tokens of the row, H heads, D their size; q, k and v side by side are C = 3 H D channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree.models.base import Sizes, silu, size_of, size_of_linear, size_of_norm
from hf_packfree.models.conv_mixer import ConvMixer
from hf_packfree.models.state import state_of
from hf_packfree.ops.conv import OP as CONV
from hf_packfree.ops.conv import qkv_conv
from hf_packfree.ops.kda import kda
from hf_packfree.packing import PackedSequence


class PackedKimiDeltaAttention(ConvMixer):
    """Put in front of a family's Kimi Delta Attention: has the packed branch, and leaves everything
    else to upstream.

    The child modules are called, so that gates and norms run upstream's formulas. Only the
    convolution's weights are read, which some families keep in fp32 in models of any dtype.
    """

    endings = ("DeltaAttention",)

    def _mix(self, x: Tensor, packed: PackedSequence) -> Tensor:
        state, heads = state_of(self), (self.num_heads, self.num_heads)
        mixed = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        # under autocast the projections' dtype is not x's
        kernels = state.kernels_for(mixed.device, mixed.dtype)
        # a convolution that holds whole heads of q and k in registers normalises them at no cost
        in_conv = CONV.backend(kernels["conv"]).qkv_conv is not None
        q, k, v = qkv_conv(
            mixed,
            self.conv1d.weight,
            packed,
            heads,
            (self.head_dim, self.head_dim),
            bias=self.conv1d.bias,
            activation=self.activation,
            qk_l2norm=in_conv,
            backend=kernels["conv"],
        )
        out = kda(
            q,
            k,
            v,
            self.forget_gate(x),
            self.b_proj(x).sigmoid(),
            packed,
            qk_l2norm=not in_conv,
            backend=kernels["kda"],
        )
        normed: Tensor = self.o_norm(out, self._output_gate(x).view_as(out))
        mixed_out: Tensor = self.o_proj(normed.flatten(2))
        return mixed_out

    def _output_gate(self, x: Tensor) -> Tensor:
        """Return the output gate [1, T, H D] before its sigmoid, from one projection, or from two
        of low rank.
        """
        found: Tensor = self.g_b_proj(self.g_a_proj(x)) if _is_low_rank(self) else self.g_proj(x)
        return found

    @staticmethod
    def op_sizes(layer: Any) -> dict[str, int]:
        """Return the numbers of heads, the sizes of a head and the convolution's width."""
        return {
            "key_heads": layer.num_heads,
            "value_heads": layer.num_heads,
            "key_size": layer.head_dim,
            "value_size": layer.head_dim,
            "taps": layer.conv_kernel_size,
        }

    @staticmethod
    def checkpoint_sizes(layer: Any) -> Sizes:
        """Return the sizes of the parameters, as found and as the module's attributes say."""
        width = layer.num_heads * layer.head_dim
        into = {
            name: (size_of_linear(getattr(layer, name)), (width, layer.hidden_size))
            for name in ("q_proj", "k_proj", "v_proj")
        }
        gate, read = ("g_b_proj", layer.head_dim), ("g_proj", layer.hidden_size)
        name, rank = gate if _is_low_rank(layer) else read
        return into | {
            "conv1d": (type(layer.conv1d), nn.Conv1d),
            "conv1d.weight": (size_of(layer.conv1d.weight), (3 * width, 1, layer.conv_kernel_size)),
            "b_proj": (size_of_linear(layer.b_proj), (layer.num_heads, layer.hidden_size)),
            "forget_gate.dt_bias": (size_of(layer.forget_gate.dt_bias), (width,)),
            name: (size_of_linear(getattr(layer, name)), (width, rank)),
            "o_norm": (size_of_norm(layer.o_norm), (layer.head_dim,)),
            "o_proj": (size_of_linear(layer.o_proj), (layer.hidden_size, width)),
            "activation": silu(layer.activation),
        }


def _is_low_rank(layer: Any) -> bool:
    return hasattr(layer, "g_b_proj")
