"""The part of a measured row that one process holds: all of it, or, under context parallelism, its
rank's shard.

Shapes: T tokens of the row, W ranks, t = ceil(T / W) tokens of a shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from hf_packfree.models.base import Replacement
from hf_packfree.models.state import state_of
from hf_packfree.parallel import ContextParallel
from hf_packfree.parallel.collectives import gathered


def settings_of(model: nn.Module) -> ContextParallel | None:
    """Return the group that shares a model's rows, or None if the model is not patched, or patched
    without a group.
    """
    ours = (module for module in model.modules() if isinstance(module, Replacement))
    return next((state_of(module).context_parallel for module in ours), None)


class Ranks:
    """The ranks that measure together; every rank calls the same methods in the same order.

    Args:
        settings: the ranks' group, or None for a process that holds the whole row.
        tokens: T.
    """

    def __init__(self, settings: ContextParallel | None, tokens: int) -> None:
        self.settings, self.tokens = settings, tokens

    def own(self, whole: Tensor, fill: float = 0) -> Tensor:
        """Return this rank's [t, ...] of a tensor [T, ...], padded on the right with `fill`."""
        if self.settings is None:
            return whole
        size = -(-self.tokens // self.settings.world)
        padding = (0, 0) * (whole.ndim - 1) + (0, size * self.settings.world - self.tokens)
        return F.pad(whole, padding, value=fill)[self.settings.rank * size :][:size]

    def whole(self, own: Tensor) -> Tensor:
        """Return [T, ...], gathered from every rank's [t, ...]."""
        return (
            own
            if self.settings is None
            else gathered(own, self.settings.group).flatten(0, 1)[: self.tokens]
        )

    def summed(self, found: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums of all ranks' gradients, for the parameters of which any rank has one.

        Args:
            found: this rank's gradients.
            like: the parameters, the same on all ranks.
        """
        if self.settings is None or not like:
            return dict(found)
        there = torch.tensor(
            [name in found for name in like],
            dtype=torch.int32,
            device=next(iter(like.values())).device,
        )
        dist.all_reduce(there, group=self.settings.group)
        total: dict[str, Tensor] = {}
        for name, anywhere in zip(like, there.tolist(), strict=True):
            if anywhere:
                total[name] = found[name].clone() if name in found else torch.zeros_like(like[name])
                dist.all_reduce(total[name], group=self.settings.group)
        return total

    def largest(self, values: Sequence[float], device: torch.device) -> float:
        """Return the largest of all ranks' values; NaN if any value is, and 0 if there are none."""
        found = torch.tensor(
            [max(values, default=0.0, key=_size)], dtype=torch.float64, device=device
        )
        everyones = (
            found if self.settings is None else gathered(found, self.settings.group).flatten()
        )
        return float(max(everyones.tolist(), key=_size))


def _size(value: float) -> float:
    return float("inf") if value != value else value
