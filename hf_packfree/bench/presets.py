"""Shapes of models to measure without a checkpoint; weights are random, which changes no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_packfree.errors import UnsupportedModel
from hf_packfree.verify.model_source import build_model

PRESETS: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 16384, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 4,
        "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "tie_word_embeddings": True,
    },
    "2b": {
        "vocab_size": 248320, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "tie_word_embeddings": True,
    },
}
"""Qwen3.5 configurations: one that a laptop's CPU trains in seconds, and the released 2B model's shape."""


def model_of(source: str, device: torch.device, dtype: torch.dtype | None, trust_remote_code: bool = False) -> nn.Module:
    """Return a preset's model, or whatever else `build_model` knows, in training mode.

    Where `dtype` is None, a preset is what it would be trained in: bfloat16 on a GPU, float32 elsewhere.

    Raises:
        UnsupportedModel: nothing of that name can be loaded.
    """
    config: Any = source
    if source in PRESETS:
        from transformers import Qwen3_5TextConfig

        config = Qwen3_5TextConfig(**PRESETS[source])
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        return build_model(config, device=device, dtype=dtype, trust_remote_code=trust_remote_code).train()
    except UnsupportedModel as error:
        if Path(source).exists():
            raise
        raise UnsupportedModel(f"{error}; or give one of the shapes {', '.join(PRESETS)}") from error
