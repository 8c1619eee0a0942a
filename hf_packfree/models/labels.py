"""What each token of a row has to predict: labels shifted within the caller's rows, then cut at document edges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_packfree.packing import PackedSequence, uncompiled, unpad

IGNORED = -100
"""torch's and transformers' default `ignore_index`: no loss where a label has this value."""


def shifted_labels(arguments: dict[str, Any]) -> Tensor:
    """Return int64 [B, S]: what each token predicts, from `shift_labels` or else `labels`, as transformers' loss does."""
    given: Tensor | None = arguments.get("shift_labels")
    if given is not None:
        return given
    return F.pad(arguments["labels"], (0, 1), value=arguments.get("ignore_index", IGNORED))[..., 1:]


@uncompiled
def row_targets(shifted: Tensor, packed: PackedSequence, ignored: int) -> dict[str, Tensor]:
    """Return the loss's arguments for the row.

    Args:
        shifted: int64 [B, S], see `shifted_labels`.
        ignored: the label that means no loss.

    Returns:
        shift_labels: int64 [1, T]; `ignored` where the next token belongs to another document, and in padding segments.
        labels: int64 [1, T]; the same one token to the right, for a loss function that shifts by itself.
        targets: int64 scalar, how many are left, 1 at least: a mean over none is 0 and not NaN.
    """
    nothing = packed.cached(_predicts_nothing).to(shifted.device)
    targets = unpad(shifted, packed).masked_fill(nothing, ignored)
    return {
        "shift_labels": targets,
        "labels": F.pad(targets, (1, 0), value=ignored)[..., :-1],
        "targets": (targets != ignored).sum().clamp(min=1),
    }


def _predicts_nothing(packed: PackedSequence) -> Tensor:
    """bool [1, T]: padding segments, and last tokens of documents that another one follows at once in the caller's row.

    A row's last token predicts what its caller says: `labels` say nothing there, `shift_labels` may.
    """
    number = packed.seq_idx[0]
    indices = torch.arange(len(number), device=number.device) if packed.indices is None else packed.indices
    same_row = (indices // packed.batch_shape[1]).diff() == 0
    follows = (number.diff() != 0) & (indices.diff() == 1) & same_row
    ends = F.pad(follows, (0, 1), value=False)[None]
    if not packed.left_pad_segments:
        return ends | ~packed.is_real()
    return torch.zeros_like(ends)  # one document per row: only its own left pad token is before it


def targets_on_padding(shifted: Tensor, packed: PackedSequence, ignored: int) -> Tensor:
    """Return int64 [M] on the host: indices into [B*S] of dropped padding tokens that have a label."""
    has_label = (shifted != ignored).reshape(-1)
    if packed.indices is not None:
        has_label = has_label.index_fill(0, packed.indices.to(has_label.device), False)
    return has_label.nonzero()[:, 0].to("cpu")


def are_left_pad_tokens(indices: Tensor, packed: PackedSequence) -> bool:
    """Whether each token, int64 [M] on the host, indices into [B*S], is the last padding token before a row's document."""
    assert packed.indices is not None
    first = packed.indices.to("cpu")[packed.cu_seqlens_cpu[:-1].long()]
    in_the_row_before = (indices + 1) % packed.batch_shape[1] == 0
    return bool((torch.isin(indices + 1, first) & ~in_the_row_before).all())
