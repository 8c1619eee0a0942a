"""What ranks send each other: counted, and where there is one GPU alone, replaced.

Each class takes the place of `torch.distributed` in hf_packfree.parallel. Bytes are those that one
rank receives from others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from hf_packfree import parallel
from hf_packfree.models import same_batch
from hf_packfree.parallel import collectives, roll_call

RATE, LATENCY = 250e9, 36e-6
"""Bytes per second that one rank of a host joined by NVLink receives, and seconds that any exchange
takes: assumed where none is measured, as `Bench.measure_exchanges` does under torchrun."""


gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""By its name before torch 2.13, and since."""


class Counted:
    """torch.distributed's exchanges, counted.

    Attributes:
        calls, received: how many there were since `reset`, and their bytes.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.calls, self.received = 0, 0.0

    def seconds(self, rate: float = RATE, latency: float = LATENCY) -> float:
        """Return how long all that was counted takes, one exchange after the other."""
        return self.received / rate + self.calls * latency

    def all_to_all_single(
        self, out: Tensor, parts: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """See torch.distributed."""
        self._count(out.nbytes * (1 - 1 / self.get_world_size(group)))
        return self._all_to_all(out, parts, group, async_op)

    def all_gather_single(
        self, out: Tensor, part: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """See torch.distributed."""
        self._count(part.nbytes * (self.get_world_size(group) - 1))
        return self._all_gather(out, part, group, async_op)

    def get_rank(self, group: Any = None) -> int:
        """See torch.distributed."""
        return dist.get_rank(group)

    def get_world_size(self, group: Any = None) -> int:
        """See torch.distributed."""
        return dist.get_world_size(group)

    def refuse_missing_ranks(self, group: Any) -> None:
        """See hf_packfree.parallel.roll_call."""
        roll_call.refuse_missing_ranks(group)

    def _count(self, size: float) -> None:
        self.calls += 1
        self.received += size

    def _all_to_all(self, out: Tensor, parts: Tensor, group: Any, async_op: bool) -> Any:
        return dist.all_to_all_single(out, parts, group=group, async_op=async_op)

    def _all_gather(self, out: Tensor, part: Tensor, group: Any, async_op: bool) -> Any:
        return gather(out, part, group=group, async_op=async_op)


class Done:
    """What is to be waited for of an exchange that is over."""

    def wait(self) -> None:
        """Wait for nothing."""


class ThroughHost(Counted):
    """Exchanges of processes that share one GPU, which NCCL does not serve: by way of the host's
    memory and gloo.
    """

    def _all_to_all(self, out: Tensor, parts: Tensor, group: Any, async_op: bool) -> Any:
        found = torch.empty_like(out, device="cpu")
        dist.all_to_all_single(found, parts.cpu(), group=group)
        out.copy_(found)
        return Done()

    def _all_gather(self, out: Tensor, part: Tensor, group: Any, async_op: bool) -> Any:
        found = torch.empty_like(out, device="cpu")
        gather(found, part.cpu(), group=group)
        out.copy_(found)
        return Done()


class Alone(Counted):
    """One rank of `world` by itself: what others would send is copied on the device from what it
    has.
    """

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.world = rank, world

    def get_rank(self, group: Any = None) -> int:
        """Return the rank that it plays."""
        return self.rank

    def get_world_size(self, group: Any = None) -> int:
        """Return how many there would be."""
        return self.world

    def refuse_missing_ranks(self, group: Any) -> None:
        """Expect nobody."""

    def _all_to_all(self, out: Tensor, parts: Tensor, group: Any, async_op: bool) -> Any:
        out.copy_(parts)
        return Done()

    def _all_gather(self, out: Tensor, part: Tensor, group: Any, async_op: bool) -> Any:
        out.view(self.world, -1).copy_(part)
        return Done()


@contextmanager
def exchanging(how: Counted) -> Iterator[Counted]:
    """Let the package exchange in this way."""
    rooms: tuple[Any, ...] = parallel, collectives
    before = [room.dist for room in rooms]
    try:
        for room in rooms:
            room.dist = how
        with patch.object(same_batch, "refuse_missing_ranks", how.refuse_missing_ranks):
            yield how
    finally:
        for room, module in zip(rooms, before, strict=True):
            room.dist = module
