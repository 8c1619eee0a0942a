"""Real text of widely varying length from Python itself, and a tokenizer trained on it."""

from __future__ import annotations

import random
import re
from pydoc_data.topics import topics
from typing import Any

SOURCE = "pydoc_data.topics, the language reference that help() shows"
SHORTEST, LONGEST = 20, 600
"""Documents in tokens: shorter passages are left out, longer ones cut."""

VOCABULARY = 1024
PADDING, END = "<pad>", "<eos>"


def passages() -> list[str]:
    """Return the reference cut where a blank line is followed by text that is not indented: a paragraph and its examples."""
    return [passage for topic in sorted(topics) for passage in re.split(r"\n\n(?=\S)", topics[topic])]


def train_tokenizer(texts: list[str]) -> Any:
    """Return a byte-level BPE tokenizer (a PreTrainedTokenizerFast) trained on `texts`."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    wrapper: Any = transformers.PreTrainedTokenizerFast
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PADDING, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return wrapper(tokenizer_object=tokenizer, pad_token=PADDING, eos_token=END)


def choose_documents(tokenizer: Any, texts: list[str], count: int, seed: int) -> list[list[int]]:
    """Return up to `count` documents as token ids, each ended by the end token, in an order drawn with `seed`."""
    documents = [[*ids[: LONGEST - 1], tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]]
    documents = [ids for ids in documents if len(ids) >= SHORTEST]
    random.Random(seed).shuffle(documents)
    return documents[:count]
