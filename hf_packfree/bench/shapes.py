"""The models of `packfree bench`: presets of text and vision-language models, and any other model
by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_packfree.errors import UnsupportedModel
from hf_packfree.verify.model_source import build_model

_SMALL: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "tie_word_embeddings": True,
}
_SMALL_LFM2: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 256,
    "intermediate_size": 768,
    "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 6,
    "layer_types": [*["conv"] * 2, "full_attention", *["conv"] * 2, "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_ATTENTION: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
_SMALL_GPT_OSS: dict[str, Any] = {
    **_ATTENTION,
    "head_dim": 32,
    "intermediate_size": 256,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_SMALL_GRANITE4H: dict[str, Any] = {
    **_ATTENTION,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "shared_intermediate_size": 768,
    "num_local_experts": 0,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "pad_token_id": 0,
}
_SMALL_KIMI: dict[str, Any] = {
    **_ATTENTION,
    "num_key_value_heads": 8,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "linear_num_heads": 4,
    "linear_head_dim": 64,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_2B: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": True,
}
_TOWER: dict[str, Any] = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
_SMALL_TOWER = {
    **_TOWER,
    "depth": 4,
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_heads": 4,
    "out_hidden_size": 256,
    "num_position_embeddings": 576,
}
_2B_TOWER = {
    **_TOWER,
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "num_position_embeddings": 2304,
}
_SMALL_TEXT: dict[str, Any] = {**_SMALL, "num_hidden_layers": 8}
_SMALL_VL: dict[str, Any] = {
    "text_config": _SMALL_TEXT,
    "vision_config": _SMALL_TOWER,
    "tie_word_embeddings": True,
    "image_token_id": 16380,
    "video_token_id": 16381,
    "vision_start_token_id": 16382,
    "vision_end_token_id": 16383,
}
_QWEN3_VL = {name: value for name, value in _SMALL_TEXT.items() if not name.startswith("linear_")}

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "small": ("Qwen3_5TextConfig", _SMALL),
    "2b": ("Qwen3_5TextConfig", _2B),
    "small-llama": ("LlamaConfig", _ATTENTION),
    "small-gpt-oss": ("GptOssConfig", _SMALL_GPT_OSS),
    "small-granite4h": ("GraniteMoeHybridConfig", _SMALL_GRANITE4H),
    "small-kimi": ("KimiLinearConfig", _SMALL_KIMI),
    "small-lfm2": ("Lfm2Config", _SMALL_LFM2),
    "small-vl": ("Qwen3_5Config", _SMALL_VL),
    "2b-vl": (
        "Qwen3_5Config",
        {"text_config": _2B, "vision_config": _2B_TOWER, "tie_word_embeddings": True},
    ),
    "small-qwen3-vl": (
        "Qwen3VLConfig",
        {
            **_SMALL_VL,
            "text_config": _QWEN3_VL,
            "vision_config": {**_SMALL_TOWER, "deepstack_visual_indexes": [0, 1, 2]},
        },
    ),
}
"""{name: configuration class and its arguments}: small ones, which a laptop's CPU trains in
seconds, and the released 2B's.
"""


def config_of(preset: str) -> Any:
    """Return the configuration of a preset."""
    import transformers

    name, given = PRESETS[preset]
    return getattr(transformers, name)(**given)


def model_of(
    source: str, device: torch.device, dtype: torch.dtype | None, trust_remote_code: bool = False
) -> nn.Module:
    """Return the model of a preset, or of another `source` by `build_model`, in training mode.

    Without `dtype`, a preset is in bfloat16 on a GPU, in float32 elsewhere.

    Raises:
        UnsupportedModel: nothing of that name can be loaded.
    """
    config: Any = source
    if source in PRESETS:
        config = config_of(source)
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        return build_model(
            config, device=device, dtype=dtype, trust_remote_code=trust_remote_code
        ).train()
    except UnsupportedModel as error:
        if Path(source).exists():
            raise
        raise UnsupportedModel(
            f"{error}; or give one of the shapes {', '.join(PRESETS)}"
        ) from error
