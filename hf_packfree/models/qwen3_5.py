"""Qwen3.5, dense: text model, heads and the vision-language class."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.qwen3_5 import configuration_qwen3_5 as configuration
from transformers.models.qwen3_5 import modeling_qwen3_5 as upstream

from hf_packfree.models.attention import GatedQKNormAttention
from hf_packfree.models.base import Sizes, put_in_front, size_of_linear
from hf_packfree.models.fusable import project
from hf_packfree.models.fused_layer import FusedDecoderLayer
from hf_packfree.models.gated_delta_net import PackedGatedDeltaNet
from hf_packfree.models.heads import heads_of
from hf_packfree.models.state import PatchState
from hf_packfree.models.trunk import PackedTrunk
from hf_packfree.models.vision_attention import vision_halves
from hf_packfree.models.vision_language import PackedVisionLanguage


class SplitProjections(PackedGatedDeltaNet):
    """Qwen3.5's layout: one projection for q, k and v, and one each for z, b and a."""

    inputs = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"

    def _project(self, x: Tensor, state: PatchState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layers = self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a
        qkv, z, b, a = project(x, *layers, state=state)
        return qkv, z, b, a

    @staticmethod
    def checkpoint_sizes(layer: Any) -> Sizes:
        """Add the four projections to what every Gated DeltaNet has."""
        values, hidden = layer.num_v_heads * layer.head_v_dim, layer.hidden_size
        channels = 2 * layer.num_k_heads * layer.head_k_dim + values
        return PackedGatedDeltaNet.checkpoint_sizes(layer) | {
            "in_proj_qkv": (size_of_linear(layer.in_proj_qkv), (channels, hidden)),
            "in_proj_z": (size_of_linear(layer.in_proj_z), (values, hidden)),
            "in_proj_b": (size_of_linear(layer.in_proj_b), (layer.num_v_heads, hidden)),
            "in_proj_a": (size_of_linear(layer.in_proj_a), (layer.num_v_heads, hidden)),
        }


CLASSES = put_in_front(
    upstream,
    __name__,
    {
        "Qwen3_5GatedDeltaNet": SplitProjections,
        "Qwen3_5Attention": GatedQKNormAttention,
        "Qwen3_5DecoderLayer": FusedDecoderLayer,
        "Qwen3_5TextModel": PackedTrunk,
        "Qwen3_5Model": PackedVisionLanguage,
        **vision_halves("Qwen3_5Vision"),
    },
)
HEADS = heads_of(upstream, __name__)
globals().update(CLASSES | HEADS)


def tiny_config() -> configuration.Qwen3_5TextConfig:
    """A model of some 100,000 parameters with every part of the family: 3 linear layers to 1
    full, grouped heads.
    """
    return configuration.Qwen3_5TextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=4096,
    )
