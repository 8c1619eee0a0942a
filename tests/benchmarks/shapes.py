"""Model shapes and document lengths by name. Widths are the published models'; layers, where fewer,
are said.

Lengths in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

TOKENS = 32768
"""Tokens of the long row."""


@dataclass(frozen=True)
class Shape:
    """One model to time.

    Attributes:
        family: the name in hf_packfree's table of families.
        config: the text configuration class, by name, in transformers.
        causal_lm: the model class, by name, in transformers.
        layers: how many are built; the fourth, eighth, ... are full attention.
        published_layers: how many the published model of this width has, or None.
        sizes: the other arguments of the configuration.
        vision: those of the vision tower's; empty where there is none.
        cut: what else is fewer than published, in words.
        attention: the attention implementation that transformers has for it.
    """

    family: str
    config: str
    causal_lm: str
    layers: int
    published_layers: int | None
    sizes: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    cut: str = ""
    attention: str = "sdpa"

    def note(self) -> str:
        """Say where the model is cut down; empty if it is whole."""
        if self.published_layers in (None, self.layers):
            return ""
        also = f" and {self.cut}" if self.cut else ""
        return (
            f"{self.layers} of {self.published_layers} layers{also}, so that every variant fits "
            f"into memory"
        )


def _dense(layers: int, published: int | None, **sizes: Any) -> Shape:
    return Shape("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", layers, published, sizes)


def _with_images(layers: int, vision: dict[str, Any], **sizes: Any) -> Shape:
    return Shape(
        "qwen3_5", "Qwen3_5Config", "Qwen3_5ForConditionalGeneration", layers, layers, sizes, vision
    )


def _moe(layers: int, published: int | None, **sizes: Any) -> Shape:
    return Shape(
        "qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", layers, published, sizes
    )


def linear_heads(keys: int, values: int, size: int = 128) -> dict[str, int]:
    """The configuration's words for the linear layers' heads."""
    return {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
    }


def special_tokens(vocabulary: int) -> dict[str, int]:
    """Return the configuration's words for tokens of media: the last of the vocabulary, which no
    text has here.
    """
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return {name: vocabulary - 1 - number for number, name in enumerate(names)}


SHAPES = {
    "2b": _dense(
        24,
        24,
        vocab_size=248320,
        hidden_size=2048,
        intermediate_size=6144,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        tie_word_embeddings=True,
        **linear_heads(16, 16),
    ),
    "9b": _dense(
        8,
        32,
        vocab_size=248320,
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        tie_word_embeddings=False,
        **linear_heads(16, 32),
    ),
    "moe": _moe(
        8,
        None,
        vocab_size=248320,
        hidden_size=2048,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        tie_word_embeddings=True,
        **linear_heads(16, 32),
    ),
    "2b-vl": _with_images(
        24,
        vocab_size=248320,
        hidden_size=2048,
        intermediate_size=6144,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        **linear_heads(16, 16),
        vision=dict(
            depth=24,
            hidden_size=1024,
            intermediate_size=4096,
            num_heads=16,
            patch_size=16,
            out_hidden_size=2048,
            num_position_embeddings=2304,
        ),
    ),
    "tiny-vl": _with_images(
        4,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        **linear_heads(2, 4, 16),
        vision=dict(
            depth=2,
            hidden_size=32,
            intermediate_size=64,
            num_heads=2,
            patch_size=4,
            out_hidden_size=64,
            num_position_embeddings=64,
        ),
    ),
    "tiny": _dense(
        4,
        None,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        **linear_heads(2, 4, 16),
    ),
    "tiny-moe": _moe(
        4,
        None,
        vocab_size=256,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        tie_word_embeddings=True,
        **linear_heads(2, 4, 16),
    ),
    # the 2B heads, so that the kernels are those of the benchmark; narrow elsewhere
    "exact": _dense(
        4,
        None,
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        **linear_heads(16, 16),
    ),
}


def configuration(shape: Shape, *, attention: str | None = None) -> Any:
    """Return the shape's transformers configuration, with this attention implementation or its
    own.
    """
    import transformers

    sizes = {"max_position_embeddings": 262144, **shape.sizes}
    # Nemotron-H counts the kinds that it is given
    if "layers_block_type" not in sizes:
        sizes["num_hidden_layers"] = shape.layers
    if shape.vision:
        special = special_tokens(sizes["vocab_size"])
        sizes = dict(
            text_config=sizes, vision_config=dict(shape.vision), tie_word_embeddings=True, **special
        )
    config = getattr(transformers, shape.config)(**sizes)
    config._attn_implementation = attention or shape.attention
    return config


def log_normal_lengths(
    total: int, *, longest: int = 2048, shortest: int = 32, seed: int = 0
) -> list[int]:
    """Draw lengths around 490 tokens (log-normal, sigma 0.8) until they fill `total` exactly;
    the last is cut.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    left = total
    while left > 0:
        drawn = float(torch.exp(0.8 * torch.randn((), generator=generator) + 6.2))
        lengths.append(min(int(max(shortest, min(longest, drawn))), left))
        left -= lengths[-1]
    return lengths


def fixed_lengths(total: int, length: int) -> list[int]:
    """Documents of one length that fill `total`; the last is cut where it does not divide."""
    if length >= total:
        return [total]
    rest = total % length
    return [length] * (total // length) + [rest] * (rest > 0)


def batch_lengths(rows: int, width: int, fill: float, seed: int = 0) -> list[int]:
    """One length per row of a padded batch: the longest is `width`, and together they fill the
    share `fill`.
    """
    drawn = torch.tensor(
        log_normal_lengths(64 * width, longest=width, seed=seed)[: rows - 1], dtype=torch.float64
    )
    wanted = fill * rows * width - width
    assert wanted >= rows - 1, (
        f"a batch of {rows} rows with one full row cannot be filled to {fill:.0%}"
    )
    # the clamp changes the sum, so scale again
    for _ in range(20):
        drawn = (drawn * wanted / drawn.sum()).clamp(1, width)
    return [width, *(int(length) for length in drawn)]
