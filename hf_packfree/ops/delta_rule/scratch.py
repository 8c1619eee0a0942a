"""Memory that is asked for again and again."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

from hf_packfree.packing import PackedSequence


class Scratch:
    """Buffers by name: asking for a name again gives the same memory, with whatever it holds.

    Fresh memory of this size costs the operating system's page faults, on a CPU more than the arithmetic done in it.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """All buffers are on `device`, of `dtype`."""
        self.device, self.dtype = device, dtype
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Return the buffer `name` as `shape`."""
        size = math.prod(shape)
        if name not in self._buffers or len(self._buffers[name]) < size:
            self._buffers[name] = torch.empty(size, device=self.device, dtype=self.dtype)
        return self._buffers[name][:size].view(shape)

    def like(self, name: str, x: Tensor) -> Tensor:
        """Return the buffer `name` in the shape of `x`."""
        return self(name, *x.shape)


def scratch_for(packed: PackedSequence, device: torch.device, dtype: torch.dtype) -> Scratch:
    """Return buffers: on a CPU those that the row's other layers used, which live as long as the row's record.

    Other devices have an allocator that gives memory back without page faults.  Threads never share buffers.
    """
    if device.type != "cpu":
        return Scratch(device, dtype)
    return packed.derive(_scratch, dtype, threading.get_ident())


def _scratch(packed: PackedSequence, dtype: torch.dtype, thread: int) -> Scratch:
    return Scratch(torch.device("cpu"), dtype)
