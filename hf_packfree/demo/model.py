"""The demo's model: a small Qwen3.5 with random weights whose recurrent states live long."""

from __future__ import annotations

from typing import Any


def build_model(tokenizer: Any, seed: int) -> Any:
    """Return a Qwen3_5ForCausalLM of about a million parameters: three linear layers, then one of full attention.

    The decay rate A is set to 0.01 ... 0.05, as in trained models that look far back: the fast decay of fresh random
    weights forgets the document before within some tokens and would hide most of a leak.
    """
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.linspace(0.01, 0.05, parameter.numel()).log())
    return model
