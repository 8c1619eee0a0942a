"""Copies from the host to a device that wait for nothing."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device | str) -> Tensor:
    """Return a copy of a host tensor on a device.

    For a GPU it is copied from pinned memory: from other memory the host may wait until the GPU has
    run all that was launched before.
    """
    if torch.device(device).type != "cuda":
        return host.to(device)
    pinned = torch.empty(host.shape, dtype=host.dtype, device="cpu", pin_memory=True)
    # torch's copy would use several of the host's threads
    np.copyto(pinned.numpy(), host.numpy())
    return pinned.to(device, non_blocking=True)
