"""Buffers that are reused from layer to layer."""

from __future__ import annotations

import math
import threading
import weakref

import torch
from torch import Tensor

from hf_packfree.packing import PackedSequence


class Scratch:
    """Buffers by name: the same name gives the same memory again, with its old contents.

    Fresh memory of this size costs the operating system's page faults, on a CPU more than the
    arithmetic done in it.
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


class _Here(threading.local):
    """This thread's buffers, and the row whose layers share them: the latest one."""

    row: weakref.ref[PackedSequence] | None = None
    spaces: dict[tuple[torch.dtype, bool], Scratch] = {}


_here = _Here()


def scratch_for(packed: PackedSequence, device: torch.device, dtype: torch.dtype) -> Scratch:
    """Return the buffers of a row: on a CPU all its layers share them, until the record is freed or
    another row comes.

    Other devices have an allocator that gives memory back without page faults. Threads never share
    buffers.
    """
    if device.type != "cpu":
        return Scratch(device, dtype)
    if _here.row is None or _here.row() is not packed:
        spaces: dict[tuple[torch.dtype, bool], Scratch] = {}
        _here.row, _here.spaces = weakref.ref(packed, lambda _: spaces.clear()), spaces
    # a tensor made in inference mode cannot be written to outside of it
    key = dtype, torch.is_inference_mode_enabled()
    return _here.spaces.setdefault(key, Scratch(device, dtype))
