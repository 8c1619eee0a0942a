"""The configuration of a tiny copy of a model: its own, with small sizes and few layers."""

from __future__ import annotations

from typing import Any

from hf_packfree.models.base import kinds_of_layers
from hf_packfree.models.tiny import SIZES

WINDOW: int = SIZES["sliding_window"]
"""The window of a tiny copy: layers that ignore it give wrong results for longer documents."""
LONGEST = 64
"""Positions of a tiny copy, fewer than the tokens of the row that is measured."""
_SHARED = 2
"""Number of last layers that share the keys of earlier ones, in models that have such layers."""
_SIZES: dict[str, Any] = SIZES | {
    "attention_chunk_size": WINDOW,
    "embedding_size": 64,
    "ffn_dim": 96,
    "first_k_dense_replace": 1,
    "floor_scale": 8,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 16,
    "index_topk": 8,
    "moe_k": 2,
    "moe_num_experts": 4,
    "num_global_key_value_heads": 2,
    "num_kv_shared_layers": _SHARED,
    "q_lora_rank": 24,
    "rotary_dim": 8,
    "shared_intermediate_size": 32,
    "top_k": 2,
    "top_k_experts": 2,
    "vocab_size_per_layer_input": 128,
}
"""{field of a config: size in the tiny copy}; other sizes stay, and are small enough with few,
narrow layers.
"""
_ALWAYS = "head_dim", "num_experts_per_tok", "num_key_value_heads"
"""Fields that are set even if the config has None or 0 for them."""
_NOT_OF_THE_MODEL = (
    "architectures",
    "auto_map",
    "dtype",
    "model_type",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
)


def shrunk(config: Any, longest: int = LONGEST) -> dict[str, Any]:
    """Return the arguments of a text model's configuration class for a tiny copy of `config`: with
    all its options, small sizes, and its first layers, at least four and one of each kind.

    Args:
        longest: the copy's number of positions.
    """
    kinds = kinds_of_layers(config)
    layers = max(4, *(kinds.index(kind) + 1 for kind in kinds))
    layers = min(len(kinds), layers + _SHARED * bool(getattr(config, "num_kv_shared_layers", 0)))
    sizes = _SIZES | {"num_hidden_layers": layers, "num_key_value_heads": _key_heads(config)}
    sizes["max_position_embeddings"] = longest
    if hasattr(config, "qk_rope_head_dim"):
        # the rotary embedding reads `head_dim`
        sizes["head_dim"] = sizes["qk_rope_head_dim"]
    names = {name: config.attribute_map.get(name, name) for name in sizes}
    sizes = {names[name]: size for name, size in sizes.items()}
    fields = {
        name: sizes[name]
        if name in sizes and (value or name in _ALWAYS)
        else _first(value, len(kinds), layers)
        for name, value in config.to_dict().items()
        if name not in _NOT_OF_THE_MODEL and not name.startswith("_")
    }
    attends = config._attn_implementation
    return fields | ({"attn_implementation": attends} if attends in ("sdpa", "eager") else {})


def _key_heads(config: Any) -> int:
    queries = getattr(config, "num_attention_heads", 1)
    keys = getattr(config, "num_key_value_heads", None) or queries
    return 4 if keys == queries else min(keys, 2)


def _first(value: Any, before: int, layers: int) -> Any:
    """Return a config's value for the copy: lists with an item per layer are cut to the first
    layers, so are dicts by layer number; rotary parameters are made to fit other sizes; other
    values stay.
    """
    if isinstance(value, list):
        return value[:layers] if len(value) == before else value
    if not isinstance(value, dict):
        return value
    if value and all(str(name).isdigit() for name in value):
        return {name: _of_layer(part) for name, part in value.items() if int(name) < layers}
    return _of_tokens_alone(value) if "rope" in str(value) else value


def _of_layer(part: Any) -> Any:
    """Return a config's value for one layer, with small sizes."""
    if not isinstance(part, dict):
        return part
    return {name: _SIZES.get(name, value) if value else value for name, value in part.items()}


def _of_tokens_alone(rope: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a rotary embedding, or a dict of them by kind of layer, for other
    sizes.

    If a list has a factor for each channel, the type becomes "default": types with lists are
    checked in `hf_packfree.models.rotary`. `original_max_position_embeddings` becomes small, so
    that scaling beyond it is measured too.
    """
    if any(isinstance(value, dict) for value in rope.values()):
        return {
            kind: _of_tokens_alone(value) if isinstance(value, dict) else value
            for kind, value in rope.items()
        }
    plain = {name: value for name, value in rope.items() if not isinstance(value, list)}
    if len(plain) < len(rope):
        return plain | {"rope_type": "default"}
    if "original_max_position_embeddings" in rope:
        plain["original_max_position_embeddings"] = WINDOW
    return plain
