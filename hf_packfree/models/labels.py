"""The targets of the tokens of a row: labels shifted within the caller's rows, then ignored at the
last token of each document.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_packfree.errors import UnsupportedInput
from hf_packfree.models.call import Call
from hf_packfree.packing import PackedSequence, repad, uncompiled, unpad
from hf_packfree.packing.pinned import to_device

IGNORED = -100
"""The default `ignore_index` of torch and transformers, the label of tokens without a loss."""


def shifted_labels(call: Call, packed: PackedSequence, shape: torch.Size) -> Tensor | None:
    """Return the target of each token, from `shift_labels` or else `labels`, as transformers' loss
    does.

    Args:
        call: the head's call, with labels.
        packed: the record of the call's batch.
        shape: the shape of the result: (B, S), or that of the tokens whose logits are kept.

    Returns:
        int64 of that shape, all ignored in a batch without documents; None where labels have
        another shape and each row is one document: upstream then reads them.

    Raises:
        UnsupportedInput: packed rows have labels of another shape.
    """
    if packed.num_documents == 0:
        return torch.full(shape, call.get("ignore_index", IGNORED), device=packed.seq_idx.device)
    name = "labels" if call.shift_labels is None else "shift_labels"
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
    """Refuse a head's call with a tree that has only one of `labels` and `shift_labels`.

    Raises:
        UnsupportedInput: the call has `labels` alone, or `shift_labels` alone.
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
        labels: int64 [1, T]; `shift_labels` moved one token to the right, for a loss function that
            shifts by itself.
        num_items_in_batch: int64 scalar, the number of targets, at least 1, so that a mean without
            targets is 0 and not NaN.
    """
    nothing = _nothing_of(packed).to(shifted.device)
    return _for_the_loss(unpad(shifted, packed).masked_fill(nothing, ignored), ignored)


@uncompiled
def own_targets(call: Call, packed: PackedSequence, ignored: int) -> dict[str, Tensor] | None:
    """Return the loss's arguments for the row where every token's target is its own label, as in
    transformers' `ForMaskedLMLoss`, or for the tokens whose logits are kept; None where labels have
    another shape, or padding has one: upstream then reads them.

    Raises:
        UnsupportedInput: packed rows have labels of another shape.
    """
    real = kept_tokens(repad(packed.is_real(), packed), call.get("logits_to_keep", 0))
    labels = shifted_labels(call.having(shift_labels=call.labels), packed, real.shape)
    if labels is None:
        return None
    padding = ~real.to(labels.device)
    if packed.plain and bool((padding & (labels != ignored)).any()):
        return None
    labels = labels.masked_fill(padding, ignored)
    row = unpad(labels, packed) if call.wants_all_logits else labels
    return {"labels": row, "num_items_in_batch": (row != ignored).sum().clamp(min=1)}


@uncompiled
def kept_targets(call: Call, packed: PackedSequence, ignored: int) -> dict[str, Tensor] | None:
    """Return the loss's arguments for the tokens whose logits are kept; `row_targets` is for all
    tokens.

    transformers' loss takes the label of the next kept token as a token's target; that label may be
    another document's.

    Args:
        call: the head's call, with labels and `logits_to_keep`.
        packed: the record of its batch.
        ignored: the label that means no loss.

    Returns:
        The arguments that `row_targets` returns, in the shape of the kept tokens. None where the
        batch has to run as upstream runs it: see `shifted_labels`, and where padding has a target.

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
    if call.shift_labels is None:
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
    """Return `_predicts_nothing`, cached for each shape: records made by `for_shape` share one
    cache.
    """
    return packed.cached(_predicts_nothing, packed.batch_shape)


def _predicts_nothing(packed: PackedSequence, batch_shape: tuple[int, int]) -> Tensor:
    """Return bool [1, T], which tokens have no target: those of padding segments, and the last
    token of a document that another document follows immediately in the caller's row.

    The last token of a row has the target in `shift_labels`, and none with `labels`. In a tree
    every token has the target in `shift_labels`.
    """
    if packed.tree is not None:
        return torch.zeros_like(packed.seq_idx, dtype=torch.bool)
    # rows with left padding hold one document each, after one pad token that is kept: there is no
    # boundary
    if packed.left_pad_segments:
        return torch.zeros_like(packed.seq_idx, dtype=torch.bool)
    if packed.indices is None:
        return to_device(_ends_on_the_host(packed, batch_shape[1]), packed.seq_idx.device)
    indices = packed.indices
    same_row = (indices // batch_shape[1]).diff() == 0
    follows = (packed.seq_idx[0].diff() != 0) & (indices.diff() == 1) & same_row
    return F.pad(follows, (0, 1), value=False)[None] | ~packed.is_real()


def _ends_on_the_host(packed: PackedSequence, row_length: int) -> Tensor:
    """Return the mask of `_predicts_nothing`, bool [1, T] on the host, for a batch without dropped
    padding; in few operations, because the GPU waits.
    """
    offsets = packed.cu_seqlens_cpu.numpy()
    nothing = np.zeros((1, packed.num_tokens), dtype=bool)
    firsts = offsets[1:-1]
    nothing[0, firsts[firsts % row_length != 0] - 1] = True
    for segment in packed.padding_segments:
        nothing[0, offsets[segment] : offsets[segment + 1]] = True
    return torch.from_numpy(nothing)


def targets_on_padding(shifted: Tensor, packed: PackedSequence, ignored: int) -> Tensor:
    """Return int64 [M] on the host: the indices into [B*S] of the dropped padding tokens that have
    a label.
    """
    has_label = (shifted != ignored).reshape(-1)
    if packed.indices is not None:
        has_label = has_label.index_fill(0, packed.indices.to(has_label.device), False)
    return has_label.nonzero()[:, 0].to("cpu")


def are_left_pad_tokens(indices: Tensor, packed: PackedSequence) -> bool:
    """Whether every token at `indices`, int64 [M] on the host, into [B*S], is the last padding
    token before a row's document.
    """
    assert packed.indices is not None
    first = packed.indices.to("cpu")[packed.cu_seqlens_cpu[:-1].long()]
    in_the_row_before = (indices + 1) % packed.batch_shape[1] == 0
    return bool((torch.isin(indices + 1, first) & ~in_the_row_before).all())
