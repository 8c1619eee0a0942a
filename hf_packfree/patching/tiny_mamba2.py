"""Fields of the tiny models' configs of Mamba-2 hybrids, see `Family.tiny`; no multiplier is one,
so that a missing one shows.
"""

from __future__ import annotations

from typing import Any

from hf_packfree.models.compat import FULL, LINEAR

_SIZES = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 32,
}

TINY: dict[str, dict[str, Any]] = {
    "granitemoehybrid": _SIZES
    | {
        "layer_types": [LINEAR, FULL] * 2,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.7,
        "logits_scaling": 0.5,
        "shared_intermediate_size": 64,
    },
    "bamba": _SIZES | {"attn_layer_indices": [1, 3]},
    "nemotron_h": {
        "layers_block_type": [LINEAR, FULL, "moe", LINEAR],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "sliding_window": None,
    },
    "falcon_h1": _SIZES
    | {
        "num_hidden_layers": 2,
        "mamba_d_ssm": 128,
        "mamba_rms_norm": True,
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.8,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.9,
        "key_multiplier": 0.8,
        "mlp_multipliers": [0.9, 1.1],
        "embedding_multiplier": 1.5,
        "lm_head_multiplier": 0.6,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "mamba_d_state": 16,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "chunk_size": 32,
        "num_mem_blocks": 1,
        "use_shared_attention_adapter": True,
        "adapter_rank": 8,
        "use_mem_rope": True,
        "num_key_value_heads": 4,
    },
    "mamba2": {"num_heads": 8, "state_size": 16, "n_groups": 2, "chunk_size": 32},
}
