"""Memory at an address, on a CPU: what the CUDA array interface gives on a GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from hf_packfree.graphs.gradient_buffers import Address


def tensor_at(address: Address, like: Tensor) -> Tensor:
    """In the place of `gradients.tensor_at`."""
    facts = address.__cuda_array_interface__
    # a class of its own takes attributes
    kind: Any = type("Bytes", (ctypes.c_char * facts["shape"][0],), {})
    memory = kind.from_address(facts["data"][0])
    memory.address = address
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=like.dtype).set_(storage, 0, like.shape, like.stride())
