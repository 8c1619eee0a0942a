"""Memory that is asked for again and again."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Scratch:
    """Buffers by name, for one call: asking for a name again gives the same memory, with whatever it holds.

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
