"""Unpad and repad: exact inverses between the caller's [B, S, ...] and the packed row's [1, T,
...].

Both run on the device of their tensor, which may not be the record's if layers are on several
devices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_packfree.packing.opaque import replaced
from hf_packfree.packing.record import PackedSequence


def unpad(batch: Tensor, packed: PackedSequence) -> Tensor:
    """Return the tokens of a batch that are in the packed row.

    Args:
        batch: [B, S, ...] of any dtype; (B, S) is `packed.batch_shape`.
        packed: the record of the row.

    Returns:
        [1, T, ...], in row order; a view of `batch` when no padding is dropped.

    Examples:
        Two documents in a padded batch, 0 being the pad token, become one row, and back:

        >>> import torch
        >>> from hf_packfree import PackedSequence
        >>> from hf_packfree.packing import repad, unpad
        >>> input_ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
        >>> real = torch.tensor([0, 1, 2, 3, 4])
        >>> packed = PackedSequence.from_lengths([3, 2], batch_shape=(2, 3), indices=real)
        >>> row = unpad(input_ids, packed)
        >>> row
        tensor([[5, 6, 7, 8, 9]])
        >>> repad(row, packed)
        tensor([[5, 6, 7],
                [8, 9, 0]])
    """
    flat = batch.flatten(0, 1)
    return (
        flat if packed.indices is None else flat.index_select(0, packed.indices.to(flat.device))
    )[None]


def repad(row: Tensor, packed: PackedSequence) -> Tensor:
    """Return a row in the shape of the caller's batch: the inverse of `unpad`, with zeros at
    padding.

    Args:
        row: [1, T, ...] of any dtype.
        packed: the record of the row.

    Returns:
        [B, S, ...]; a view of `row` when no padding was dropped, and `row` itself when it already
        has that shape.

    Examples:
        A left-padded batch; values of real tokens return to their positions:

        >>> import torch
        >>> from hf_packfree import PackedSequence
        >>> from hf_packfree.packing import repad
        >>> real = torch.tensor([2, 3, 4, 5])
        >>> packed = PackedSequence.from_lengths([1, 3], batch_shape=(2, 3), indices=real)
        >>> repad(torch.tensor([[0.5, 1.0, 1.5, 2.0]]), packed)
        tensor([[0.0000, 0.0000, 0.5000],
                [1.0000, 1.5000, 2.0000]])
    """
    rows, tokens = packed.batch_shape
    if packed.indices is None:
        # the same tensor, so that hooks on the logits of one row see the gradient of the loss
        return row if rows == 1 else row.squeeze(0).reshape(rows, tokens, *row.shape[2:])
    flat = row.new_zeros((rows * tokens, *row.shape[2:]))
    # the token that stands for a batch of nothing but padding is zeroed like padding, and keeps its
    # graph
    if packed.num_documents == 0:
        row = row.masked_fill(torch.ones_like(row, dtype=torch.bool), 0)
    return flat.index_copy(0, packed.indices.to(row.device), row.squeeze(0)).reshape(
        rows, tokens, *row.shape[2:]
    )


def with_left_pad_tokens(packed: PackedSequence, indices: Tensor) -> PackedSequence:
    """Return the record with the last pad token before some documents kept, see
    `PackedSequence.left_pad_segments`.

    Args:
        packed: one document per row, padding dropped.
        indices: int64 [L] on the host, rising: the pad tokens to keep, in the flattened [B*S].
    """
    assert packed.indices is not None
    kept = torch.cat((packed.indices.to("cpu"), indices))
    order = kept.argsort()
    starts = torch.zeros(packed.num_tokens, dtype=torch.bool, device="cpu")
    starts[packed.cu_seqlens_cpu[:-1].long()] = True
    starts = torch.cat((starts, torch.ones_like(indices, dtype=torch.bool)))[order]
    left_pads = tuple((starts.cumsum(0) - 1)[order >= packed.num_tokens].tolist())
    longer = PackedSequence.from_lengths(
        lengths_of(starts),
        device=packed.cu_seqlens.device,
        batch_shape=packed.batch_shape,
        indices=kept[order],
        padding_segments=left_pads,
        plain=packed.plain,
    )
    return replaced(longer, left_pad_segments=left_pads)


def lengths_of(starts: Tensor) -> Tensor:
    """Return the documents' lengths, given which tokens start one: bool [T], the first is True."""
    return torch.nn.functional.pad(starts.nonzero()[:, 0], (0, 1), value=starts.numel()).diff()
