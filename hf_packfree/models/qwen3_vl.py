"""Qwen3-VL, dense: full attention with normalised q and k, and image features added between the
first layers.
"""

from __future__ import annotations

from transformers.models.qwen3_vl import configuration_qwen3_vl as configuration
from transformers.models.qwen3_vl import modeling_qwen3_vl as upstream

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


def tiny_config() -> configuration.Qwen3VLConfig:
    """Return the configuration of a model of some 200,000 parameters with every part of the family:
    image features are added after two layers.
    """
    text = qwen3_text_sizes(intermediate_size=96)
    return configuration.Qwen3VLConfig(
        text_config=text, vision_config=qwen3_vision_sizes(), **PLACEHOLDERS
    )
