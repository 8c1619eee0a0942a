"""Not keeping for the backward pass what one cheap kernel makes again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def computed_again(
    tensors: Sequence[Tensor], make: Callable[[], Sequence[Tensor]], worth_it: bool
) -> AbstractContextManager[Any]:
    """Within the block, autograd keeps `make` instead of `tensors`, and calls it when a gradient needs them.

    Args:
        tensors: what `make` returned just now; views of them that cover them whole count as them.
        make: has to return the same bits, and to hold what it needs.
        worth_it: otherwise, and where checkpointing or offloading decides already what is kept, nothing changes.
    """
    if not worth_it or not torch.is_grad_enabled() or torch.compiler.is_compiling() or _others_decide():
        return nullcontext()
    made = _Made(make)
    places = {tensor.data_ptr(): (index, tensor.numel()) for index, tensor in enumerate(tensors)}

    def pack(kept: Tensor) -> Any:
        index, size = places.get(kept.data_ptr(), (None, -1))
        if index is None or kept.numel() != size or not kept.is_contiguous():
            return kept
        return index, kept.shape

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else made.take(packed[0]).view(packed[1])

    return saved_tensors_hooks(pack, unpack)


class _Made:
    """Makes all tensors when the first is asked for, and lets go of each as it is taken."""

    def __init__(self, make: Callable[[], Sequence[Tensor]]) -> None:
        self.make = make
        self.left: dict[int, Tensor] = {}

    def take(self, index: int) -> Tensor:
        if index not in self.left:
            with torch.no_grad():
                self.left = dict(enumerate(self.make()))
        return self.left.pop(index)


def _others_decide() -> bool:
    """Whether hooks of gradient checkpointing or activation offloading are in force."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None
