"""The effect of a leak on a trained model: which documents change whose predictions, and by how
much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_packfree.demo.results import Continuations, Influence
from hf_packfree.verify import relative_rms

PROMPT = 6
"""Tokens of a prompt, the beginning of a document."""
NEW = 10
"""Tokens of a continuation."""
TRIES = 24
"""Beginnings that are tried.

A neighbour changes the continuations of some beginnings, of short ones more often.
"""


@torch.no_grad()
def influence(model: Any, documents: Sequence[list[int]], others: Sequence[list[int]]) -> Influence:
    """Measure how much documents change each other's logits, in a patched or unpatched model.

    Args:
        model: in evaluation mode, on its device.
        documents: token ids, packed into one row.
        others: token ids, for each document another one that replaces it, to see whose logits
            change.
    """
    row, changed = logits(model, documents), []
    for place, other in enumerate(others):
        # of the same length, so that other documents keep their positions
        other = (other * len(documents[place]))[: len(documents[place])]
        moved = logits(model, [*documents[:place], other, *documents[place + 1 :]])
        changed.append([relative_rms(new, old) for new, old in zip(moved, row)])
    return Influence(tuple(zip(*changed)))


def logits(model: Any, documents: Sequence[list[int]]) -> list[Tensor]:
    """Return the logits [tokens, vocabulary] of each document of a packed row."""
    lengths = list(map(len, documents))
    ids = torch.tensor([[token for document in documents for token in document]])
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    device = model.device
    found = model(input_ids=ids.to(device), position_ids=positions.to(device), use_cache=False)
    return list(found.logits[0].split(lengths))


@torch.no_grad()
def continuation(model: Any, neighbours: Sequence[list[int]], prompt: list[int]) -> list[int]:
    """Continue a prompt greedily up to the end token, as the last document of a packed row."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + NEW and tokens[-1] != model.config.eos_token_id:
        tokens.append(int(logits(model, [*neighbours, tokens])[-1][-1].argmax()))
    return tokens[len(prompt) :]


def continuations(
    unpatched: Any, patched: Any, tokenizer: Any, documents: Sequence[list[int]]
) -> Continuations:
    """Continue one prompt alone and after each of two neighbours, by both models; of a few prompts,
    one whose continuation the neighbour changes, if there is one.
    """
    first, second, *rest = documents
    for document in rest[:TRIES]:
        prompt = document[:PROMPT]
        found = [continuation(unpatched, [other], prompt) for other in (first, second)]
        if found[0] != found[1]:
            break
    mended = [continuation(patched, [other], prompt) for other in (first, second)]
    alone = continuation(unpatched, [], prompt)
    ids = {"prompt": prompt, "alone": alone, "unpatched": found, "patched": mended}

    def text(given: Any) -> Any:
        if isinstance(given[0], list):
            return tuple(map(text, given))
        return tokenizer.decode(given)

    return Continuations(**{name: text(value) for name, value in ids.items()})
