"""Unpad and repad: exact inverses between the caller's [B, S, ...] and the packed row's [1, T, ...]."""

from __future__ import annotations

from torch import Tensor

from hf_packfree.packing.record import PackedSequence


def unpad(batch: Tensor, packed: PackedSequence) -> Tensor:
    """Return [1, T, ...], the real tokens of `batch` [B, S, ...] in row order; a view when nothing is dropped."""
    flat = batch.flatten(0, 1)
    return (flat if packed.indices is None else flat.index_select(0, packed.indices))[None]


def repad(row: Tensor, packed: PackedSequence) -> Tensor:
    """Return [B, S, ...], the inverse of `unpad` for `row` [1, T, ...]; zeros where padding was."""
    rows, tokens = packed.batch_shape
    if packed.indices is None:
        return row[0].reshape(rows, tokens, *row.shape[2:])
    flat = row.new_zeros((rows * tokens, *row.shape[2:]))
    return flat.index_copy(0, packed.indices, row[0]).reshape(rows, tokens, *row.shape[2:])
