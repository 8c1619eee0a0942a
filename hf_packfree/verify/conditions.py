"""The conditions of a measurement: evaluation mode and slow decay, products in fp32, no advice, and
which packages run meanwhile.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hf_packfree.models.slow_decay import slow_decays


@contextmanager
def prepared(model: nn.Module, slow_decay: bool) -> Iterator[None]:
    """Set evaluation mode and slow decay for the block, and restore both afterwards."""
    modes = {module: module.training for module in model.modules()}
    slow = slow_decays(model) if slow_decay else {}
    decays = {parameter: parameter.detach().clone() for parameter in slow}
    model.eval()
    try:
        with torch.no_grad():
            for parameter, decay in slow.items():
                parameter.copy_(_sharded_as(parameter, decay))
        yield
    finally:
        with torch.no_grad():
            for parameter, before in decays.items():
                parameter.copy_(before)
        for module, training in modes.items():
            module.training = training


def _sharded_as(parameter: Tensor, x: Tensor) -> Tensor:
    """Return x as ranks hold the parameter, on every one of which this is called."""
    if not isinstance(parameter, DTensor):
        return x
    x = x.to(parameter.device, parameter.dtype)
    return distribute_tensor(x, parameter.device_mesh, parameter.placements)


@contextmanager
def no_tf32_in_cudnn() -> Iterator[None]:
    """Let cuDNN compute fp32 in fp32: by torch's default its convolutions round to TF32, which in
    the patches of images alone looks like a leak (1.6e-4 of the logits, 3.3e-7 without).
    """
    cudnn: Any = torch.backends.cudnn
    operations = cudnn.conv, cudnn.rnn
    before = [each.fp32_precision for each in operations]
    # not by `fp32_precision`, after which torch refuses to read `allow_tf32`
    cudnn.allow_tf32 = False
    try:
        yield
    finally:
        cudnn.allow_tf32 = before == ["tf32", "tf32"]
        for each, precision in zip(operations, before, strict=True):
            each.fp32_precision = precision


@contextmanager
def no_advice() -> Iterator[None]:
    """Hide transformers' advice to install kernels for its own forward, which documents alone and
    the control run: a patched model does not need them.
    """
    logger = logging.getLogger("transformers.integrations.hub_kernels")

    def keep(record: logging.LogRecord) -> bool:
        return "reference PyTorch implementation" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


@contextmanager
def packages_called() -> Iterator[set[str]]:
    """Collect, for the block, the top-level packages whose Python functions are called in this
    thread.
    """
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            found.add(str(frame.f_globals.get("__name__")).partition(".")[0])

    before: Any = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        if before is None or callable(before):
            sys.setprofile(before)
        else:
            # cProfile's before Python 3.12, which is set by itself alone
            sys.setprofile(None)
            before.enable()
