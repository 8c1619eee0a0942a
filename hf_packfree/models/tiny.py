"""Sizes that the tiny configurations of vision-language families share, without any family's own
modeling file.

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
