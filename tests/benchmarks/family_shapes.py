"""Shapes of families beside Qwen's: plain attention, experts with sinks, Mamba-2, short
convolutions and Kimi Delta Attention. Widths are the published models' that each row names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.benchmarks.shapes import Shape

_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LINEAR, _FULL = "linear_attention", "full_attention"

FAMILY_SHAPES = {
    # Granite 4.0 H Micro: one of ten layers attends, without positions
    "granite4h": Shape(
        "granitemoehybrid",
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        10,
        40,
        dict(
            vocab_size=100352,
            hidden_size=2048,
            shared_intermediate_size=8192,
            num_attention_heads=32,
            num_key_value_heads=8,
            layer_types=[*[_LINEAR] * 5, _FULL, *[_LINEAR] * 4],
            num_local_experts=0,
            mamba_n_heads=64,
            mamba_d_head=64,
            mamba_d_state=128,
            mamba_n_groups=1,
            attention_multiplier=0.015625,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            logits_scaling=8.0,
            tie_word_embeddings=True,
            **_TOKENS,
        ),
    ),
    # Llama 3.2 1B
    "llama": Shape(
        "llama",
        "LlamaConfig",
        "LlamaForCausalLM",
        12,
        16,
        dict(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            tie_word_embeddings=True,
            **_TOKENS,
        ),
    ),
    # LFM2 1.2B
    "lfm2": Shape(
        "lfm2",
        "Lfm2Config",
        "Lfm2ForCausalLM",
        12,
        16,
        dict(
            vocab_size=65536,
            hidden_size=2048,
            intermediate_size=8192,
            block_auto_adjust_ff_dim=False,
            num_attention_heads=32,
            num_key_value_heads=8,
            layer_types=[*["conv", "conv", _FULL] * 3, "conv", _FULL, "conv"],
            **_TOKENS,
        ),
    ),
    # Nemotron-H 4B: a layer is a mixer or an MLP
    "nemotronh": Shape(
        "nemotron_h",
        "NemotronHConfig",
        "NemotronHForCausalLM",
        13,
        52,
        dict(
            vocab_size=131072,
            hidden_size=3072,
            intermediate_size=12288,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            layers_block_type=[*[_LINEAR, "mlp"] * 3, _LINEAR, _FULL, *["mlp", _LINEAR] * 2, "mlp"],
            mamba_num_heads=112,
            mamba_head_dim=64,
            ssm_state_size=128,
            n_groups=8,
            **_TOKENS,
        ),
    ),
    # gpt-oss 20B
    "gptoss": Shape(
        "gpt_oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        4,
        24,
        dict(
            vocab_size=201088,
            hidden_size=2880,
            intermediate_size=2880,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
            sliding_window=128,
            num_local_experts=32,
            num_experts_per_tok=4,
            max_position_embeddings=131072,
            **_TOKENS,
        ),
        attention="eager",
    ),
    # Kimi Linear 48B-A3B
    "kimi": Shape(
        "kimi_linear",
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        4,
        27,
        dict(
            vocab_size=163840,
            hidden_size=2304,
            intermediate_size=9216,
            num_attention_heads=32,
            layer_types=[*[_LINEAR] * 3, _FULL],
            linear_num_heads=32,
            linear_head_dim=128,
            num_local_experts=64,
            num_experts_per_tok=8,
            moe_intermediate_size=1024,
            **_TOKENS,
        ),
        cut="64 of 256 experts",
    ),
}

_NARROW: dict[str, Any] = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
)
_TINY: dict[str, dict[str, Any]] = {
    "granite4h": dict(
        shared_intermediate_size=96,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
        attention_multiplier=0.25,
    ),
    "llama": dict(head_dim=16),
    "lfm2": {},
    "nemotronh": dict(
        head_dim=16, mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=16, n_groups=2
    ),
    "gptoss": dict(head_dim=16, sliding_window=16, num_local_experts=4, num_experts_per_tok=2),
    "kimi": dict(
        num_key_value_heads=4,
        linear_num_heads=4,
        linear_head_dim=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
}


def family_shape(name: str, tiny: bool) -> Shape:
    """Return the shape, or as many layers of the same kinds with narrow widths."""
    found = FAMILY_SHAPES[name]
    return replace(found, sizes={**found.sizes, **_NARROW, **_TINY[name]}) if tiny else found
