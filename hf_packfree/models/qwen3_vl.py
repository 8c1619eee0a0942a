"""Qwen3-VL, dense: plain attention with normalised q and k, and image features added between the
first layers.
"""

from __future__ import annotations

from torch import Tensor
from transformers.models.qwen3_vl import configuration_qwen3_vl as configuration
from transformers.models.qwen3_vl import modeling_qwen3_vl as upstream

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
class Qwen3VLTextAttention(QKNormAttention, upstream.Qwen3VLTextAttention):
    """Upstream's layer, plus the packed branch."""

    def _rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return upstream.apply_rotary_pos_emb(q, k, cos, sin)


@stands_for(upstream)
class Qwen3VLTextModel(PackedDeepstack, PackedTrunk, upstream.Qwen3VLTextModel):
    """Upstream's trunk, plus the record."""


@stands_for(upstream)
class Qwen3VLModel(PackedVisionLanguage, upstream.Qwen3VLModel):
    """Upstream's vision-language model, plus the record, and positions per document."""


@stands_for(upstream)
class Qwen3VLVisionModel(PackedVisionTower, upstream.Qwen3VLVisionModel):
    """Upstream's vision tower, plus whether the batch is packed."""


@stands_for(upstream)
class Qwen3VLVisionPatchEmbed(PackedPatchEmbedding, upstream.Qwen3VLVisionPatchEmbed):
    """Upstream's layer, plus the branch for packed batches."""


@stands_for(upstream)
class Qwen3VLVisionBlock(PackedVisionBlock, upstream.Qwen3VLVisionBlock):
    """Upstream's block, plus the branch for packed batches."""


@stands_for(upstream)
class Qwen3VLVisionAttention(PackedVisionAttention, upstream.Qwen3VLVisionAttention):
    """Upstream's layer, plus the branch for packed batches."""

    def _rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return upstream.apply_rotary_pos_emb_vision(q, k, cos, sin)


HEADS = heads_of(upstream, __name__)
globals().update(HEADS)


def tiny_config() -> configuration.Qwen3VLConfig:
    """A model of some 200,000 parameters with every part of the family: two layers get image
    features of their own.
    """
    text = qwen3_text_sizes(intermediate_size=96)
    return configuration.Qwen3VLConfig(
        text_config=text, vision_config=qwen3_vision_sizes(), **PLACEHOLDERS
    )
