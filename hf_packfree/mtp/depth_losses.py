"""Targets and losses of every depth, within documents, from the labels of the main loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_packfree.models.head_loss import as_multiplied
from hf_packfree.models.labels import IGNORED
from hf_packfree.models.state import PatchState
from hf_packfree.mtp.gathered_weights import LogitLayer, readable_weights
from hf_packfree.mtp.head import ahead
from hf_packfree.ops.loss import linear_cross_entropy
from hf_packfree.packing import PackedSequence
from hf_packfree.parallel.collectives import sum_over_ranks

SAMPLE = 1024
"""Tokens of a row whose most likely prediction is compared with the target, for the accuracy:
comparing all would cost another matrix product.
"""


@dataclass(frozen=True)
class DepthLosses:
    """The losses of one batch; index k - 1 is depth k.

    Attributes:
        sums: each depth's summed cross entropy, with its graph; of this rank's tokens under context
            parallelism.
        facts: per depth [4], of the whole row: the summed cross entropy, the number of targets, the
            number of targets sampled for the accuracy, and the number of these that the most likely
            token equals.
    """

    sums: tuple[Tensor, ...]
    facts: tuple[Tensor, ...]


def depth_losses(
    states: Sequence[Tensor],
    targets: Tensor,
    packed: PackedSequence,
    layer: Any,
    state: PatchState,
    *,
    detach: bool,
) -> DepthLosses:
    """Return the losses of every depth's hidden states.

    Args:
        states: per depth [1, T, D_model], see `MTPHead.forward`.
        targets: int64 [1, T], the main loss's targets, `IGNORED` at the end of every document;
            under context parallelism [1, T + depths], with those of the tokens that follow this
            rank's.
        packed: the record of the row.
        layer: the last layer of the language modelling head.
        state: the patched model's, which names the loss's backend.
        detach: whether `layer`'s parameters get no gradient.
    """
    sums, facts, weights = [], [], readable_weights(layer, states[0].dtype, detach=detach)
    for depth, hidden in enumerate(states, start=1):
        wanted = ahead(targets, packed, depth, IGNORED)[0].to(hidden.device)
        total = _summed_loss(hidden[0], wanted, weights, state)
        tried, right = _hits(hidden[0], wanted, weights)
        sums.append(total)
        found = total.detach(), (wanted != IGNORED).sum(), tried, right
        facts.append(torch.stack([one.double() for one in found]))
    return DepthLosses(tuple(sums), tuple(sum_over_ranks(one, packed) for one in facts))


def _summed_loss(hidden: Tensor, targets: Tensor, weights: LogitLayer, state: PatchState) -> Tensor:
    """Return the summed cross entropy of hidden [T, D_model]; with plain weights the logits of all
    tokens are never in memory.
    """
    parts = None if weights.weight is None else as_multiplied(hidden, weights)
    backend = "upstream"
    if parts is not None:
        backend = state.kernels_for(hidden.device, parts[0].dtype)["loss"]
    if parts is None or backend == "upstream":
        kept = targets != IGNORED
        logits = weights.logits(hidden[kept])
        wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        return F.cross_entropy(wide, targets[kept], reduction="sum")
    x, weight, bias = parts
    return linear_cross_entropy(
        x, weight, targets, bias=bias, ignore_index=IGNORED, backend=backend
    )


@torch.no_grad()
def _hits(hidden: Tensor, targets: Tensor, weights: LogitLayer) -> tuple[Tensor, Tensor]:
    """Return the number of targets that were sampled, evenly spaced, and the number of these that
    the most likely token equals.
    """
    count = min(SAMPLE, len(targets))
    some = torch.arange(count, device=hidden.device) * len(targets) // count
    wanted = targets.index_select(0, some)
    likely = weights.logits(hidden.index_select(0, some)).argmax(-1)
    return (wanted != IGNORED).sum(), (likely == wanted).sum()
