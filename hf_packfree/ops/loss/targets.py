"""Which tokens have something to predict, counted where nobody waits for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_WORTH = 0.95
"""The share of tokens with targets from which on choosing them costs more than the products of the rest."""


@dataclass(frozen=True, eq=False)
class Targets:
    """What every token has to predict.

    Attributes:
        flat: int64 [T], -1 where there is nothing to predict; a target that is no word is above all words.
        order: int64 [T], the tokens with targets first, in their order; None on the CPU.
        count: int64 scalar on the host, how many these are; where `ready` is given, from then on.
        ready: a CUDA event.
    """

    flat: Tensor
    order: Tensor | None
    count: Tensor
    ready: Any = None

    @classmethod
    def of(cls, targets: Tensor, ignore_index: int) -> Targets:
        """Read targets, int64 of any shape, and start to count them.

        Called before a forward pass, the count has come long before the loss wants it.
        """
        flat = targets.detach().reshape(-1)
        has = flat != ignore_index
        flat = flat.bitwise_and(torch.iinfo(torch.int64).max).where(has, -1)  # a negative one is no word either
        if not flat.is_cuda:
            return cls(flat, None, has.sum())
        count = torch.empty((), dtype=torch.int64, pin_memory=True)
        count.copy_(has.sum(), non_blocking=True)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(flat.device))
        return cls(flat, has.argsort(descending=True, stable=True), count, ready)

    def chosen(self) -> Tensor | None:
        """Return int64 [N], the tokens that have targets; None where nearly all do."""
        if self.ready is not None:
            self.ready.synchronize()
        count = int(self.count)
        if count > _WORTH * self.flat.numel():
            return None
        return (self.flat >= 0).nonzero()[:, 0] if self.order is None else self.order[:count]
