"""Qwen3-VL-MoE: Qwen3-VL with sparse experts."""

from __future__ import annotations

from torch import Tensor
from transformers.models.qwen3_vl_moe import configuration_qwen3_vl_moe as configuration
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as upstream

from hf_packfree.models.attention import QKNormAttention
from hf_packfree.models.base import stands_for
from hf_packfree.models.heads import heads_of
from hf_packfree.models.placeholders import PackedDeepstack
from hf_packfree.models.tiny import PLACEHOLDERS, qwen3_text_sizes, qwen3_vision_sizes
from hf_packfree.models.trunk import PackedTrunk
from hf_packfree.models.vision_attention import (
    PackedPatchEmbedding,
    PackedVisionAttention,
    PackedVisionBlock,
    PackedVisionTower,
)
from hf_packfree.models.vision_language import PackedVisionLanguage


@stands_for(upstream)
class Qwen3VLMoeTextAttention(QKNormAttention, upstream.Qwen3VLMoeTextAttention):
    """Upstream's layer, plus the packed branch."""

    def _rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return upstream.apply_rotary_pos_emb(q, k, cos, sin)


@stands_for(upstream)
class Qwen3VLMoeTextModel(PackedDeepstack, PackedTrunk, upstream.Qwen3VLMoeTextModel):
    """Upstream's trunk, plus the record."""


@stands_for(upstream)
class Qwen3VLMoeModel(PackedVisionLanguage, upstream.Qwen3VLMoeModel):
    """Upstream's vision-language model, plus the record, and positions per document."""


@stands_for(upstream)
class Qwen3VLMoeVisionModel(PackedVisionTower, upstream.Qwen3VLMoeVisionModel):
    """Upstream's vision tower, plus whether the batch is packed."""


@stands_for(upstream)
class Qwen3VLMoeVisionPatchEmbed(PackedPatchEmbedding, upstream.Qwen3VLMoeVisionPatchEmbed):
    """Upstream's layer, plus the branch for packed batches."""


@stands_for(upstream)
class Qwen3VLMoeVisionBlock(PackedVisionBlock, upstream.Qwen3VLMoeVisionBlock):
    """Upstream's block, plus the branch for packed batches."""


@stands_for(upstream)
class Qwen3VLMoeVisionAttention(PackedVisionAttention, upstream.Qwen3VLMoeVisionAttention):
    """Upstream's layer, plus the branch for packed batches."""

    def _rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return upstream.apply_rotary_pos_emb_vision(q, k, cos, sin)


HEADS = heads_of(upstream, __name__)
globals().update(HEADS)


def tiny_config() -> configuration.Qwen3VLMoeConfig:
    """A model of some 250,000 parameters with every part of the family: 4 experts, image
    features added after two layers.
    """
    text = qwen3_text_sizes(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
    return configuration.Qwen3VLMoeConfig(
        text_config=text, vision_config=qwen3_vision_sizes(), **PLACEHOLDERS
    )
