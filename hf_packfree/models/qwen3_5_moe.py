"""Qwen3.5-MoE: text model, heads and the vision-language class."""

from __future__ import annotations

from torch import Tensor
from transformers.models.qwen3_5_moe import configuration_qwen3_5_moe as configuration
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as upstream

from hf_packfree.models.attention import GatedQKNormAttention
from hf_packfree.models.base import stands_for
from hf_packfree.models.fused_layer import FusedDecoderLayer
from hf_packfree.models.heads import heads_of
from hf_packfree.models.qwen3_5 import SplitProjections
from hf_packfree.models.trunk import PackedTrunk
from hf_packfree.models.vision_attention import (
    PackedPatchEmbedding,
    PackedVisionAttention,
    PackedVisionBlock,
    PackedVisionTower,
)
from hf_packfree.models.vision_language import PackedVisionLanguage


@stands_for(upstream)
class Qwen3_5MoeGatedDeltaNet(SplitProjections, upstream.Qwen3_5MoeGatedDeltaNet):
    """Upstream's layer, plus the packed branch."""


@stands_for(upstream)
class Qwen3_5MoeAttention(GatedQKNormAttention, upstream.Qwen3_5MoeAttention):
    """Upstream's layer, plus the packed branch."""

    def _rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return upstream.apply_rotary_pos_emb(q, k, cos, sin)


@stands_for(upstream)
class Qwen3_5MoeDecoderLayer(FusedDecoderLayer, upstream.Qwen3_5MoeDecoderLayer):
    """Upstream's layer, plus the packed branch."""


@stands_for(upstream)
class Qwen3_5MoeTextModel(PackedTrunk, upstream.Qwen3_5MoeTextModel):
    """Upstream's trunk, plus the record."""


@stands_for(upstream)
class Qwen3_5MoeModel(PackedVisionLanguage, upstream.Qwen3_5MoeModel):
    """Upstream's vision-language model, plus the record, and positions per document."""


@stands_for(upstream)
class Qwen3_5MoeVisionModel(PackedVisionTower, upstream.Qwen3_5MoeVisionModel):
    """Upstream's vision tower, plus whether the batch is packed."""


@stands_for(upstream)
class Qwen3_5MoeVisionPatchEmbed(PackedPatchEmbedding, upstream.Qwen3_5MoeVisionPatchEmbed):
    """Upstream's layer, plus the branch for packed batches."""


@stands_for(upstream)
class Qwen3_5MoeVisionBlock(PackedVisionBlock, upstream.Qwen3_5MoeVisionBlock):
    """Upstream's block, plus the branch for packed batches."""


@stands_for(upstream)
class Qwen3_5MoeVisionAttention(PackedVisionAttention, upstream.Qwen3_5MoeVisionAttention):
    """Upstream's layer, plus the branch for packed batches."""

    def _rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return upstream.apply_rotary_pos_emb_vision(q, k, cos, sin)


HEADS = heads_of(upstream, __name__)
globals().update(HEADS)


def tiny_config() -> configuration.Qwen3_5MoeTextConfig:
    """A model of some 150,000 parameters with every part of the family: 3 linear layers to 1
    full, 4 experts.
    """
    return configuration.Qwen3_5MoeTextConfig(
        vocab_size=128,
        hidden_size=64,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
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
