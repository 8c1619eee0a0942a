"""Qwen2.5-VL: attention with biases and without norms of q and k; no released model has a sliding
window.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl as configuration
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as upstream

from hf_packfree.models.attention import PackedAttention
from hf_packfree.models.base import classes_of
from hf_packfree.models.heads import heads_of
from hf_packfree.models.tiny import PLACEHOLDERS, text_sizes, vision_sizes
from hf_packfree.models.trunk import PackedTrunk
from hf_packfree.models.vision_attention import (
    PackedPatchEmbedding,
    PackedVisionAttention,
    PackedVisionTower,
)
from hf_packfree.models.vision_language import PackedVisionLanguage


class MultimodalRotaryAttention(PackedAttention):
    """Put in front of attention that may apply the rotary embedding of time, height and width
    itself.
    """

    def _rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        # up to transformers 5.16 the layers choose among the angles of time, height and width, [3,
        # 1, T, D]
        if cos.ndim == 4:
            config: Any = self.config
            older: Any = upstream
            rotated: tuple[Tensor, Tensor] = older.apply_multimodal_rotary_pos_emb(
                q, k, cos, sin, config.rope_parameters["mrope_section"]
            )
            return rotated
        return super()._rotate(q, k, cos, sin)


CLASSES = classes_of(
    upstream,
    __name__,
    MultimodalRotaryAttention,
    PackedTrunk,
    PackedVisionLanguage,
    PackedVisionTower,
    PackedPatchEmbedding,
    PackedVisionAttention,
)
HEADS = heads_of(upstream, __name__)
globals().update(CLASSES | HEADS)


def tiny_config() -> configuration.Qwen2_5_VLConfig:
    """Return the configuration of a model of some 150,000 parameters with every part of the family:
    one block of its tower attends in windows.
    """
    text = text_sizes(intermediate_size=96)
    vision = vision_sizes(depth=2, window_size=16, fullatt_block_indexes=[1])
    return configuration.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **PLACEHOLDERS)
