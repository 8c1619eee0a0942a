"""Qwen3-Next: text model, sparse experts, and projections interleaved per key head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_next import configuration_qwen3_next as configuration
from transformers.models.qwen3_next import modeling_qwen3_next as upstream

from hf_packfree.models.attention import GatedQKNormAttention
from hf_packfree.models.base import Sizes, classes_of, size_of_linear
from hf_packfree.models.fused_layer import FusedDecoderLayer
from hf_packfree.models.gated_delta_net import PackedGatedDeltaNet
from hf_packfree.models.heads import heads_of
from hf_packfree.models.plain_layers import project
from hf_packfree.models.state import PatchState
from hf_packfree.models.tiny import expert_sizes
from hf_packfree.models.trunk import PackedTrunk


class InterleavedProjections(PackedGatedDeltaNet):
    """Qwen3-Next's layout: two projections, interleaved per key head.

    For each key head, `in_proj_qkvz` returns its q, its k, and v and z of the value heads that read
    it; `in_proj_ba` returns b and a of these value heads.
    """

    inputs = "in_proj_qkvz", "in_proj_ba"

    def _project(self, x: Tensor, state: PatchState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        group = self.num_v_heads // self.num_k_heads
        qkvz, ba = project(x, self.in_proj_qkvz, self.in_proj_ba, state=state)
        per_head = qkvz.unflatten(-1, (self.num_k_heads, -1))
        values = group * self.head_v_dim
        q, k, v, z = per_head.split([self.head_k_dim, self.head_k_dim, values, values], dim=-1)
        b, a = ba.unflatten(-1, (self.num_k_heads, -1)).split([group, group], dim=-1)
        mixed = torch.cat([part.flatten(-2) for part in (q, k, v)], dim=-1)
        return mixed, z.flatten(-2), b.flatten(-2), a.flatten(-2)

    @staticmethod
    def checkpoint_sizes(layer: Any) -> Sizes:
        """Add the sizes of the two interleaved projections to those of every Gated DeltaNet."""
        keys, values = layer.num_k_heads * layer.head_k_dim, layer.num_v_heads * layer.head_v_dim
        return PackedGatedDeltaNet.checkpoint_sizes(layer) | {
            "in_proj_qkvz": (
                size_of_linear(layer.in_proj_qkvz),
                (2 * (keys + values), layer.hidden_size),
            ),
            "in_proj_ba": (
                size_of_linear(layer.in_proj_ba),
                (2 * layer.num_v_heads, layer.hidden_size),
            ),
        }


CLASSES = classes_of(
    upstream,
    __name__,
    InterleavedProjections,
    GatedQKNormAttention,
    FusedDecoderLayer,
    PackedTrunk,
)
HEADS = heads_of(upstream, __name__)
globals().update(CLASSES | HEADS)


def tiny_config() -> configuration.Qwen3NextConfig:
    """Return the configuration of a model of some 150,000 parameters with every part of the family:
    three linear-attention layers to one of full attention, 4 experts.
    """
    return configuration.Qwen3NextConfig(**expert_sizes(intermediate_size=96))
