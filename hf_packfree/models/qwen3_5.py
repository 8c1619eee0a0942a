"""Qwen3.5, dense: text model, heads and the vision-language class."""

from __future__ import annotations

from transformers.models.qwen3_5 import configuration_qwen3_5 as configuration
from transformers.models.qwen3_5 import modeling_qwen3_5 as upstream

from hf_packfree.models.attention import GatedQKNormAttention
from hf_packfree.models.base import classes_of
from hf_packfree.models.fused_layer import FusedDecoderLayer
from hf_packfree.models.gated_delta_net import SplitProjections
from hf_packfree.models.heads import heads_of
from hf_packfree.models.tiny import delta_net_sizes
from hf_packfree.models.trunk import PackedTrunk
from hf_packfree.models.vision_attention import VISION_MIXINS
from hf_packfree.models.vision_language import PackedVisionLanguage

CLASSES = classes_of(
    upstream,
    __name__,
    SplitProjections,
    GatedQKNormAttention,
    FusedDecoderLayer,
    PackedTrunk,
    PackedVisionLanguage,
    *VISION_MIXINS,
)
HEADS = heads_of(upstream, __name__)
globals().update(CLASSES | HEADS)


def tiny_config() -> configuration.Qwen3_5TextConfig:
    """Return the configuration of a model of some 100,000 parameters with every part of the family:
    three linear-attention layers to one of full attention, grouped heads.
    """
    return configuration.Qwen3_5TextConfig(**delta_net_sizes(intermediate_size=96))
