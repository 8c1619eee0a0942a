"""What each token of a row has to predict: labels shifted within the caller's rows, then cut at
document edges.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_packfree.errors import UnsupportedInput
from hf_packfree.models.call import Call
from hf_packfree.packing import PackedSequence, repad, uncompiled, unpad

IGNORED = -100
"""torch's and transformers' default `ignore_index`: no loss where a label has this value."""


def shifted_labels(call: Call, packed: PackedSequence, shape: torch.Size) -> Tensor | None:
    """Return what each token predicts, from `shift_labels` or else `labels`, as transformers' loss
    does.

    Args:
        call: of the head, with labels.
        packed: the record of its batch.
        shape: of the result: (B, S), or that of the tokens whose logits are kept.

    Returns:
        int64 of that shape, all ignored in a batch without documents; None where labels have
        another shape and each row is one document: upstream knows what they mean.

    Raises:
        UnsupportedInput: packed rows have labels of another shape.
    """
    if packed.num_documents == 0:
        return torch.full(shape, call.get("ignore_index", IGNORED), device=packed.seq_idx.device)
    name = "labels" if call.get("shift_labels") is None else "shift_labels"
    given = call.arguments[name]
    found = tuple(given.shape) if isinstance(given, Tensor) else f"type {type(given).__name__}"
    if found not in (tuple(shape), (shape.numel(),)):
        if packed.plain:
            return None
        raise UnsupportedInput(
            f"found {name} of {'shape ' if isinstance(found, tuple) else ''}{found} for packed "
            f"rows with logits of {tuple(shape)} tokens; wanted one for each of these tokens; cut "
            f"or pad {name} as the tokens are"
        )
    # rows of one document are shifted as upstream has them
    labels: Tensor = given if packed.plain else given.reshape(shape)
    if name == "labels":
        labels = F.pad(labels, (0, 1), value=call.get("ignore_index", IGNORED))[..., 1:]
    return labels.reshape(shape)


def refuse_unshifted(call: Call) -> None:
    """Refuse a head's call with a tree that has `labels` or `shift_labels` without the other.

    Raises:
        UnsupportedInput: it has `labels` alone, or `shift_labels` alone.
    """
    labels, shifted = (call.get(name) is not None for name in ("labels", "shift_labels"))
    if labels and not shifted:
        raise UnsupportedInput(
            "found labels for a tree of shared prefixes, whose next label may be another branch's; "
            "wanted shift_labels, what each token predicts, or log-probabilities by index; see "
            "hf_packfree.data.pack_prefixes"
        )
    if shifted and not labels:
        raise UnsupportedInput(
            "found shift_labels without labels for a tree of shared prefixes, as where a Trainer "
            "takes labels out for a loss of its own (label_smoothing_factor, compute_loss_func), "
            "which shifts them across branches; wanted both, for the model's loss; pass "
            "labels=shift_labels too, or leave shift_labels out"
        )


@uncompiled
def row_targets(shifted: Tensor, packed: PackedSequence, ignored: int) -> dict[str, Tensor]:
    """Return the loss's arguments for the row.

    Args:
        shifted: int64 [B, S], see `shifted_labels`.
        ignored: the label that means no loss.

    Returns:
        shift_labels: int64 [1, T]; `ignored` where the next token belongs to another document, and
            in padding segments.
        labels: int64 [1, T]; the same one token to the right, for a loss function that shifts by
            itself.
        num_items_in_batch: int64 scalar, how many are left, 1 at least: a mean over none is 0 and
            not NaN.
    """
    nothing = _nothing_of(packed).to(shifted.device)
    return _for_the_loss(unpad(shifted, packed).masked_fill(nothing, ignored), ignored)


@uncompiled
def kept_targets(call: Call, packed: PackedSequence, ignored: int) -> dict[str, Tensor] | None:
    """Return the loss's arguments for the tokens whose logits are kept: what `row_targets` does for
    all of them.

    transformers' loss takes the next kept token's label for a token's target, which may be another
    document's.

    Args:
        call: of the head, with labels and `logits_to_keep`.
        packed: the record of its batch.
        ignored: the label that means no loss.

    Returns:
        As `row_targets`, in the shape of the kept tokens; None where only upstream knows: see
        `shifted_labels`, and where padding would have to predict.

    Raises:
        UnsupportedInput: see `shifted_labels`.
    """
    number = kept_tokens(repad(packed.seq_idx + 1, packed), call.arguments["logits_to_keep"])
    targets = shifted_labels(call, packed, number.shape)
    if targets is None:
        return None
    number = number.to(targets.device)
    if packed.plain:
        predicted = (targets != ignored) & (number == 0)
        return (
            None
            if packed.indices is not None and bool(predicted.any())
            else _for_the_loss(targets, ignored)
        )
    nothing = kept_tokens(repad(_nothing_of(packed), packed), call.arguments["logits_to_keep"]).to(
        targets.device
    )
    if call.get("shift_labels") is None:
        nothing = nothing | F.pad(number.diff() != 0, (0, 1), value=False)
    return _for_the_loss(targets.masked_fill(nothing | (number == 0), ignored), ignored)


def kept_tokens(batch: Tensor, keep: int | Tensor) -> Tensor:
    """Return the tokens of a batch [B, S] that transformers' `logits_to_keep` keeps: [B, K], or
    [K] for a mask [B, S].
    """
    if isinstance(keep, int):
        return batch[:, slice(-keep, None)]
    keep = keep.to(batch.device)
    if keep.ndim == 2:
        return batch[keep] if keep.dtype == torch.bool else batch.take_along_dim(keep, 1)
    return batch[:, keep]


def _for_the_loss(targets: Tensor, ignored: int) -> dict[str, Tensor]:
    return {
        "shift_labels": targets.contiguous(),
        "labels": F.pad(targets, (1, 0), value=ignored)[..., :-1],
        "num_items_in_batch": (targets != ignored).sum().clamp(min=1),
    }


def _nothing_of(packed: PackedSequence) -> Tensor:
    """Return `_predicts_nothing`, kept by shape: records of `for_shape` share what they keep."""
    return packed.cached(_predicts_nothing, packed.batch_shape)


def _predicts_nothing(packed: PackedSequence, batch_shape: tuple[int, int]) -> Tensor:
    """bool [1, T]: padding segments, and last tokens of documents that another one follows at once
    in the caller's row.

    The last token of a row predicts what `shift_labels` says of it; with `labels` it predicts
    nothing. In a tree every token predicts what `shift_labels` says.
    """
    if packed.tree is not None:
        return torch.zeros_like(packed.seq_idx, dtype=torch.bool)
    # rows with left padding hold one document each, after a pad token of its own: no boundary
    if packed.left_pad_segments:
        return torch.zeros_like(packed.seq_idx, dtype=torch.bool)
    if packed.indices is None:
        ends = _ends_on_the_host(packed, batch_shape[1])
        return ends.to(packed.seq_idx.device, non_blocking=True)
    indices = packed.indices
    same_row = (indices // batch_shape[1]).diff() == 0
    follows = (packed.seq_idx[0].diff() != 0) & (indices.diff() == 1) & same_row
    return F.pad(follows, (0, 1), value=False)[None] | ~packed.is_real()


def _ends_on_the_host(packed: PackedSequence, row_length: int) -> Tensor:
    """Return the same on the host, bool [1, T], for a batch without dropped padding; the GPU waits,
    so in few operations.
    """
    offsets = packed.cu_seqlens_cpu.numpy()
    nothing = np.zeros((1, packed.num_tokens), dtype=bool)
    firsts = offsets[1:-1]
    nothing[0, firsts[firsts % row_length != 0] - 1] = True
    for segment in packed.padding_segments:
        nothing[0, offsets[segment] : offsets[segment + 1]] = True
    return torch.from_numpy(nothing)


def targets_on_padding(shifted: Tensor, packed: PackedSequence, ignored: int) -> Tensor:
    """Return int64 [M] on the host: indices into [B*S] of dropped padding tokens that have a
    label.
    """
    has_label = (shifted != ignored).reshape(-1)
    if packed.indices is not None:
        has_label = has_label.index_fill(0, packed.indices.to(has_label.device), False)
    return has_label.nonzero()[:, 0].to("cpu")


def are_left_pad_tokens(indices: Tensor, packed: PackedSequence) -> bool:
    """Whether each token, int64 [M] on the host, indices into [B*S], is the last padding token
    before a row's document.
    """
    assert packed.indices is not None
    first = packed.indices.to("cpu")[packed.cu_seqlens_cpu[:-1].long()]
    in_the_row_before = (indices + 1) % packed.batch_shape[1] == 0
    return bool((torch.isin(indices + 1, first) & ~in_the_row_before).all())
