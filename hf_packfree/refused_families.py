"""Families of transformers that no patch makes exact, and why. This file imports nothing, so that
`packfree models` answers at once.

A family that is neither in this table nor in that of `patching/registry.py` is measured when one of
its models is patched: see `patching/unlisted.py`.
"""

from __future__ import annotations

_REASONS = {
    "Mamba-1's selective scan mixes tokens, and no exact one that stops at documents is here": (
        "falcon_mamba jamba mamba zamba"
    ),
    "a recurrence of its own mixes tokens, and no exact one that stops at documents is here": (
        "minimax qwen4_exp recurrent_gemma rwkv xlstm"
    ),
    "short convolutions inside its attention cross from one document into the next": (
        "inkling inkling2 inkling2_loop zaya"
    ),
    "its attention compresses or selects tokens of the whole row": (
        "axk2 deepseek_v32 deepseek_v4 dots3_note glm_moe_dsa hy_v4 minimax_m3_vl mistral_large4"
    ),
    "chunks of attention and its temperature follow the row, not the document": "llama4",
    "its attention does not go through transformers' AttentionInterface": (
        "big_bird bloom cpmant ctrl falcon gpt_neo gpt_neox_japanese megatron_bert mpt mvp "
        "openai prophetnet reformer rembert roformer trocr xglm xlm xlnet"
    ),
    "its text model does not hold its decoder layers as `layers`": (
        "codegen gpt2 gpt_bigcode gptj opt"
    ),
    "its layers hand no keywords to their attention, so that boundaries are lost on the way": (
        "nemotron stablelm"
    ),
    "its sliding window is in its mask alone, and attention that needs no mask never sees it": (
        "blt doge phimoe unlimited_ocr"
    ),
}

REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""{transformers' folder of the family: why no patch makes the family exact}."""


def by_reason() -> dict[str, tuple[str, ...]]:
    """Return {reason: the families that are refused for this reason}."""
    return {reason: tuple(names.split()) for reason, names in _REASONS.items()}
