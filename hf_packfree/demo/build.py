"""What the demo trains: real text of widely varying length from Python itself, a tokenizer and a small model."""

from __future__ import annotations

import random
import re
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

SHORTEST, LONGEST = 20, 600
"""Documents in tokens: shorter passages are left out, longer ones cut."""

VOCABULARY = 1024
PADDING, END = "<pad>", "<eos>"


def passages() -> list[str]:
    """Return Python's language reference, which help() shows, cut into paragraphs with their indented examples."""
    return [passage for topic in sorted(topics) for passage in re.split(r"\n\n(?=\S)", topics[topic])]


def train_tokenizer(texts: list[str]) -> Any:
    """Return a byte-level BPE tokenizer (a PreTrainedTokenizerFast) trained on `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[PADDING, END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapper: Any = PreTrainedTokenizerFast
    return wrapper(tokenizer_object=tokenizer, pad_token=PADDING, eos_token=END)


def choose_documents(tokenizer: Any, texts: list[str], count: int, seed: int) -> list[list[int]]:
    """Return up to `count` documents as token ids, each ended by the end token, in an order drawn with `seed`."""
    documents = [[*ids[: LONGEST - 1], tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]]
    documents = [ids for ids in documents if len(ids) >= SHORTEST]
    random.Random(seed).shuffle(documents)
    return documents[:count]


def build_model(tokenizer: Any, seed: int) -> Any:
    """Return a Qwen3_5ForCausalLM of about a million random parameters: three linear layers, then one of full attention.

    The decay rate A is set to 0.01 ... 0.05, as in trained models with a long memory: the fast decay of fresh random
    weights forgets the document before within a few tokens and would hide most of a leak.
    """
    sizes: dict[str, Any] = {
        "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "tie_word_embeddings": True,
    }
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(vocab_size=len(tokenizer), **sizes, **special))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.linspace(0.01, 0.05, parameter.numel()).log())
    return model
