"""Qwen3-VL-MoE: Qwen3-VL with sparse experts."""

from __future__ import annotations

from transformers.models.qwen3_vl_moe import configuration_qwen3_vl_moe as configuration
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as upstream

from hf_packfree.models.attention import QKNormAttention
from hf_packfree.models.base import classes_of
from hf_packfree.models.fused_layer import PlainDecoderLayer
from hf_packfree.models.heads import heads_of
from hf_packfree.models.placeholders import PackedDeepstack
from hf_packfree.models.tiny import PLACEHOLDERS, qwen3_text_sizes, qwen3_vision_sizes
from hf_packfree.models.vision_attention import VISION_MIXINS
from hf_packfree.models.vision_language import PackedVisionLanguage

CLASSES = classes_of(
    upstream,
    __name__,
    QKNormAttention,
    PlainDecoderLayer,
    PackedDeepstack,
    PackedVisionLanguage,
    *VISION_MIXINS,
)
HEADS = heads_of(upstream, __name__)
globals().update(CLASSES | HEADS)


def tiny_config() -> configuration.Qwen3VLMoeConfig:
    """Return the configuration of a model of some 250,000 parameters with every part of the family:
    4 experts, image features added after two layers.
    """
    text = qwen3_text_sizes(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
    return configuration.Qwen3VLMoeConfig(
        text_config=text, vision_config=qwen3_vision_sizes(), **PLACEHOLDERS
    )
