"""The same documents padded and packed, as transformers' collators make them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORED = -100


def documents_of(lengths: tuple[int, ...], vocabulary: int, seed: int) -> list[Tensor]:
    """Random documents, int64 [n] each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (length,), generator=generator) for length in lengths]


def padded(documents: list[Tensor], device: torch.device) -> dict[str, Any]:
    """Rows padded on the right to the longest; padding has no loss."""
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(document) for document in documents], batch_first=True)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}
    return {name: value.to(device) for name, value in batch.items()}


def packed(documents: list[Tensor], device: torch.device, *, every_form: bool = True) -> dict[str, Any]:
    """One row, with all keywords of transformers' flattening collator, or with positions alone."""
    lengths = [len(document) for document in documents]
    ids = torch.cat(documents)[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].to(torch.int32)
    batch = {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, IGNORED)}
    if every_form:
        batch |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "seq_idx": numbers}
    row: dict[str, Any] = {name: value.to(device) for name, value in batch.items()}
    return {**row, "max_length_q": max(lengths), "max_length_k": max(lengths)} if every_form else row
