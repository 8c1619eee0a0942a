"""Qwen3-Omni-MoE's thinker: text, images, videos and audio; image features are added between the
first layers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe as configuration
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as upstream

from hf_packfree.models import compat
from hf_packfree.models.absent_media import run_with_absent_media
from hf_packfree.models.attention import QKNormAttention
from hf_packfree.models.audio_tower import PackedAudioAttention, PackedAudioTower
from hf_packfree.models.base import classes_of, put_in_front
from hf_packfree.models.call import Call
from hf_packfree.models.fused_layer import PlainDecoderLayer
from hf_packfree.models.heads import PackedHead
from hf_packfree.models.placeholders import PackedDeepstack
from hf_packfree.models.tiny import PLACEHOLDERS, qwen3_text_sizes, qwen3_vision_sizes
from hf_packfree.models.vision_attention import VISION_MIXINS
from hf_packfree.models.vision_language import (
    PackedVisionLanguage,
    keep_record_from_towers,
    packed_arguments,
    upstreams_arguments,
)


class ThinkerHead(PackedHead):
    """The head of transformers' releases in which the head holds the towers itself: one forward
    computes the loss from pixels.
    """

    def _forward_as_row(self, upstream: Any, call: Call) -> Any:
        def forward(head: Any, **given: Any) -> Any:
            packed = given.get("packed_sequence")
            if packed:
                # the experts' statistics need the mask, and observers of the text model the
                # caller's shape
                kept = {"attention_mask": given.get("attention_mask"), "packed_sequence": packed}
                packed = packed.for_shape(Call(self, given).batch.shape)
                given = packed_arguments(self, packed, given) | kept
            else:
                given = upstreams_arguments(self, given)
            return run_with_absent_media(self, partial(upstream, head), given)

        return super()._forward_as_row(forward, call)


_HEAD = "Qwen3OmniMoeThinkerForConditionalGeneration"
CLASSES = classes_of(
    upstream,
    __name__,
    QKNormAttention,
    PlainDecoderLayer,
    PackedDeepstack,
    PackedVisionLanguage,
    *VISION_MIXINS,
    PackedAudioTower,
    PackedAudioAttention,
)
HEADS: dict[str, Any] = put_in_front(
    upstream,
    __name__,
    {getattr(upstream, _HEAD): ThinkerHead if compat.THINKER_HOLDS_TOWERS else PackedHead},
)
if compat.THINKER_HOLDS_TOWERS:
    keep_record_from_towers(HEADS[_HEAD])
globals().update(CLASSES | HEADS)


def tiny_config() -> configuration.Qwen3OmniMoeThinkerConfig:
    """Return the configuration of a model of some 200,000 parameters with every part of the family:
    image features are added after two layers.
    """
    text = qwen3_text_sizes(
        intermediate_size=96,
        moe_intermediate_size=48,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
    )
    audio = {
        "num_mel_bins": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "d_model": 32,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "max_source_positions": 64,
        "n_window": 50,
        "output_dim": 64,
        "n_window_infer": 800,
        "conv_chunksize": 3,
        "downsample_hidden_size": 8,
    }
    tokens = PLACEHOLDERS | {
        "audio_token_id": 121,
        "audio_start_token_id": 122,
        "audio_end_token_id": 123,
    }
    return configuration.Qwen3OmniMoeThinkerConfig(
        text_config=text,
        vision_config=qwen3_vision_sizes(),
        audio_config=audio,
        architectures=list(HEADS),
        **tokens,
    )
