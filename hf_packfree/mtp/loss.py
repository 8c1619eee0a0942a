"""Targets and losses of every depth: within documents, of the labels that the main loss has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_packfree.models.labels import IGNORED
from hf_packfree.mtp.head import ahead
from hf_packfree.packing import PackedSequence


@dataclass(frozen=True)
class DepthLosses:
    """What one batch gives; index k - 1 is depth k.

    Attributes:
        sums: each depth's summed cross entropy, with its graph.
        correct, counts: int64 scalars per depth: targets that the most likely token hits, and all targets.
    """

    sums: tuple[Tensor, ...]
    correct: tuple[Tensor, ...]
    counts: tuple[Tensor, ...]


def depth_losses(
    states: Sequence[Tensor], targets: Tensor, packed: PackedSequence, project: Callable[[Tensor], Tensor]
) -> DepthLosses:
    """Return the losses of the head's states.

    Args:
        states: per depth [1, T, D_model], see `MTPHead.forward`.
        targets: int64 [1, T], what the main loss wants each token to predict, `IGNORED` at the end of every document.
        packed: the record of the row.
        project: the language modelling head: [M, D_model] to [M, V].
    """
    found = []
    for depth, hidden in enumerate(states, start=1):
        wanted = ahead(targets, packed, depth, IGNORED)[0]
        found.append(_summed_loss(hidden[0], wanted, project))
    sums, correct, counts = zip(*found)
    return DepthLosses(sums, correct, counts)


def _summed_loss(
    hidden: Tensor, targets: Tensor, project: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed cross entropy of hidden [T, D_model], and how many targets were most likely, and how many there are."""
    kept = targets != IGNORED
    logits, wanted = project(hidden[kept]), targets[kept].to(hidden.device)
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    correct = (logits.detach().argmax(-1) == wanted).sum()
    return F.cross_entropy(wide, wanted, reduction="sum"), correct, kept.sum()
