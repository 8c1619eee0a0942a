"""Sizes that the tiny configurations of families share, without any family's own modeling file.

Each call returns new dicts, because configurations complete those that they are given.
"""

from __future__ import annotations

from typing import Any

PLACEHOLDERS: dict[str, Any] = {
    "image_token_id": 124,
    "video_token_id": 125,
    "vision_start_token_id": 126,
    "vision_end_token_id": 127,
}
"""Ids above those of text."""

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "head_dim": 16,
    "sliding_window": 16,
    # experts
    "n_group": 1,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "topk_group": 1,
    # multi-head latent attention
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Of what a configuration says, by transformers' names."""


def text_sizes(**own: Any) -> dict[str, Any]:
    """Return keywords of a text configuration: 3 layers of 4 heads, angles for time, height and
    width; plus a family's own.
    """
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
    return {
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": rope,
        **own,
    }


def qwen3_text_sizes(**own: Any) -> dict[str, Any]:
    """Return the same for Qwen3's text models: heads of 16 channels, whose angles are
    interleaved.
    """
    sizes = text_sizes(head_dim=16, **own)
    sizes["rope_parameters"]["mrope_interleaved"] = True
    return sizes


def delta_net_sizes(**own: Any) -> dict[str, Any]:
    """Return keywords of a text configuration of Gated DeltaNet: 3 linear layers to 1 full, grouped
    heads of 16 channels; plus a family's own.
    """
    return {
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "max_position_embeddings": 4096,
        **own,
    }


def expert_sizes(**own: Any) -> dict[str, Any]:
    """Return the same with 4 experts, 2 of which each token goes to."""
    return delta_net_sizes(
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        **own,
    )


def vision_sizes(**own: Any) -> dict[str, Any]:
    """Return keywords of a vision configuration: patches of 4 x 4 pixels, 2 heads; plus a
    family's own.
    """
    return {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 64,
        **own,
    }


def qwen3_vision_sizes() -> dict[str, Any]:
    """Return the same for Qwen3's towers: 3 blocks, two of which hand features to layers of the
    text model.
    """
    return vision_sizes(depth=3, num_position_embeddings=64, deepstack_visual_indexes=[0, 1])
