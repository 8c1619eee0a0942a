"""Sizes that the tiny configurations of families share; imports no modeling file.

Each function returns new dicts, because configurations add keys to the dicts that they get.
"""

from __future__ import annotations

from typing import Any

PLACEHOLDERS: dict[str, Any] = {
    "image_token_id": 124,
    "video_token_id": 125,
    "vision_start_token_id": 126,
    "vision_end_token_id": 127,
}
"""Placeholder ids, above the ids of text."""

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
"""{transformers' name of a field: value}; each family's configuration takes the fields that it
knows.
"""


def text_sizes(**own: Any) -> dict[str, Any]:
    """Return keywords of a text configuration with 3 layers of 4 heads and mRoPE, and the family's
    `own` keywords.
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
    """Return keywords of a text configuration of Qwen3-VL or Qwen3-Omni: those of `text_sizes`,
    with heads of 16 channels and interleaved mRoPE.
    """
    sizes = text_sizes(head_dim=16, **own)
    sizes["rope_parameters"]["mrope_interleaved"] = True
    return sizes


def delta_net_sizes(**own: Any) -> dict[str, Any]:
    """Return keywords of a text configuration with Gated DeltaNet: three linear-attention layers to
    one of full attention, grouped heads of 16 channels; and the family's `own` keywords.
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
    """Return the keywords of `delta_net_sizes` with 4 experts, of which each token uses 2."""
    return delta_net_sizes(
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        **own,
    )


def vision_sizes(**own: Any) -> dict[str, Any]:
    """Return keywords of a vision configuration with patches of 4 x 4 pixels and 2 heads, and the
    family's `own` keywords.
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
    """Return keywords of a vision configuration of Qwen3-VL or Qwen3-Omni: 3 blocks, of which two
    pass features to layers of the text model.
    """
    return vision_sizes(depth=3, num_position_embeddings=64, deepstack_visual_indexes=[0, 1])
