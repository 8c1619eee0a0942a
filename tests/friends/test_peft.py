"""PEFT."""

from __future__ import annotations

import torch

TARGETS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj",
           "gate_proj", "up_proj", "down_proj")  # fmt: skip


def lora(model, **options):
    """Return the model with adapters on every projection, seeded and not zero, so that every one has a gradient."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **{"target_modules": list(TARGETS)} | options)
    torch.manual_seed(5)
    return get_peft_model(model, config)
