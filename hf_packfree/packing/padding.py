"""Unpad and repad: exact inverses between the caller's [B, S, ...] and the packed row's [1, T, ...].

Both work where their tensor is: with layers on several devices that is not always where the record is.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hf_packfree.packing.record import PackedSequence


def unpad(batch: Tensor, packed: PackedSequence) -> Tensor:
    """Return [1, T, ...], the real tokens of `batch` [B, S, ...] in row order; a view when nothing is dropped."""
    flat = batch.flatten(0, 1)
    return (flat if packed.indices is None else flat.index_select(0, packed.indices.to(flat.device)))[None]


def repad(row: Tensor, packed: PackedSequence) -> Tensor:
    """Return [B, S, ...], the inverse of `unpad` for `row` [1, T, ...]; zeros where padding was."""
    rows, tokens = packed.batch_shape
    if packed.indices is None:
        return row[0].reshape(rows, tokens, *row.shape[2:])
    flat = row.new_zeros((rows * tokens, *row.shape[2:]))
    return flat.index_copy(0, packed.indices.to(row.device), row[0]).reshape(rows, tokens, *row.shape[2:])


def with_left_pad_tokens(packed: PackedSequence, places: Tensor) -> PackedSequence:
    """Return the record with a token of padding kept before some documents, see `PackedSequence.left_pad_segments`.

    Args:
        packed: one document per row, padding dropped.
        places: int64 [L] on the host, rising: places in the flattened [B*S] of the last padding token before a document.
    """
    device, kept = packed.cu_seqlens.device, packed.indices
    assert kept is not None
    kept = torch.cat((kept.to("cpu"), places))
    order = kept.argsort()
    starts = torch.zeros(packed.num_tokens, dtype=torch.bool)
    starts[packed.cu_seqlens_cpu[:-1].long()] = True
    starts = torch.cat((starts, torch.ones_like(places, dtype=torch.bool)))[order]
    lengths = torch.cat((starts.nonzero()[:, 0], torch.tensor([starts.numel()]))).diff()
    left_pads = tuple((starts.cumsum(0) - 1)[order >= packed.num_tokens].tolist())
    longer = PackedSequence.from_lengths(
        lengths,
        device=device,
        batch_shape=packed.batch_shape,
        indices=kept[order],
        padding_segments=left_pads,
        plain=packed.plain,
    )
    return replace(longer, left_pad_segments=left_pads)
