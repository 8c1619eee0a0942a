"""Qwen3-Omni-MoE's thinker: text, images, videos and audio; image features are added between the
first layers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe as configuration
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as upstream

from hf_packfree.models import compat
from hf_packfree.models.attention import QKNormAttention
from hf_packfree.models.audio_tower import PackedAudioAttention, PackedAudioTower
from hf_packfree.models.base import stands_for
from hf_packfree.models.heads import PackedHead
from hf_packfree.models.idle_tower import run_beside_idle_tower
from hf_packfree.models.placeholders import PackedDeepstack
from hf_packfree.models.tiny import PLACEHOLDERS, qwen3_text_sizes, qwen3_vision_sizes
from hf_packfree.models.trunk import PackedTrunk
from hf_packfree.models.vision_attention import (
    PackedPatchEmbedding,
    PackedVisionAttention,
    PackedVisionBlock,
    PackedVisionTower,
)
from hf_packfree.models.vision_language import (
    PackedVisionLanguage,
    keep_record_from_towers,
    packed_arguments,
)


@stands_for(upstream)
class Qwen3OmniMoeThinkerTextAttention(QKNormAttention, upstream.Qwen3OmniMoeThinkerTextAttention):
    """Upstream's layer, plus the packed branch."""

    def _rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return upstream.apply_rotary_pos_emb(q, k, cos, sin)


@stands_for(upstream)
class Qwen3OmniMoeThinkerTextModel(
    PackedDeepstack, PackedTrunk, upstream.Qwen3OmniMoeThinkerTextModel
):
    """Upstream's trunk, plus the record."""


@stands_for(upstream)
class Qwen3OmniMoeVisionEncoder(PackedVisionTower, upstream.Qwen3OmniMoeVisionEncoder):
    """Upstream's vision tower, plus whether the batch is packed."""


@stands_for(upstream)
class Qwen3OmniMoeVisionPatchEmbed(PackedPatchEmbedding, upstream.Qwen3OmniMoeVisionPatchEmbed):
    """Upstream's layer, plus the branch for packed batches."""


@stands_for(upstream)
class Qwen3OmniMoeVisionBlock(PackedVisionBlock, upstream.Qwen3OmniMoeVisionBlock):
    """Upstream's block, plus the branch for packed batches."""


@stands_for(upstream)
class Qwen3OmniMoeVisionAttention(PackedVisionAttention, upstream.Qwen3OmniMoeVisionAttention):
    """Upstream's layer, plus the branch for packed batches."""

    def _rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return upstream.apply_rotary_pos_emb_vision(q, k, cos, sin)


@stands_for(upstream)
class Qwen3OmniMoeAudioEncoder(PackedAudioTower, upstream.Qwen3OmniMoeAudioEncoder):
    """Upstream's audio tower, where short audios are padded as they are alone."""


@stands_for(upstream)
class Qwen3OmniMoeAudioAttention(PackedAudioAttention, upstream.Qwen3OmniMoeAudioAttention):
    """Upstream's layer, plus windows in every release, in one call."""


class ThinkerHead(PackedHead):
    """The head of releases in which it holds the towers itself: one forward from pixels to the
    loss.
    """

    def _forward_as_row(self, upstream: Any, arguments: dict[str, Any]) -> Any:
        def forward(head: Any, **given: Any) -> Any:
            packed = given.get("packed_sequence")
            if packed:
                tokens = (
                    given["input_ids"]
                    if given.get("input_ids") is not None
                    else given["inputs_embeds"]
                )
                # experts' statistics need the mask, and who observes the trunk the caller's shape
                kept = {"attention_mask": given.get("attention_mask"), "packed_sequence": packed}
                given = packed_arguments(self, packed.for_shape(tokens.shape[:2]), given) | kept
            return run_beside_idle_tower(self, partial(upstream, head), given)

        return super()._forward_as_row(forward, arguments)


_Thinker: Any = upstream.Qwen3OmniMoeThinkerForConditionalGeneration

if compat.THINKER_HOLDS_TOWERS:

    @stands_for(upstream)
    class Qwen3OmniMoeThinkerForConditionalGeneration(ThinkerHead, _Thinker):
        """Upstream's model with its head, on real tokens, and positions per document."""

    keep_record_from_towers(Qwen3OmniMoeThinkerForConditionalGeneration)

else:

    @stands_for(upstream)
    class Qwen3OmniMoeThinkerModel(PackedVisionLanguage, upstream.Qwen3OmniMoeThinkerModel):
        """Upstream's model around the text model, plus the record, and positions per document."""

    @stands_for(upstream)
    class Qwen3OmniMoeThinkerForConditionalGeneration(PackedHead, _Thinker):  # type: ignore[no-redef]
        """Upstream's head, on real tokens."""


HEADS = {"Qwen3OmniMoeThinkerForConditionalGeneration": Qwen3OmniMoeThinkerForConditionalGeneration}


def tiny_config() -> configuration.Qwen3OmniMoeThinkerConfig:
    """A model of some 200,000 parameters with every part of the family: two layers get image
    features of their own.
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
