"""Not keeping for the backward pass what one cheap kernel makes again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def computed_again(made: Tensor, make: Callable[[], Tensor], worth_it: bool) -> AbstractContextManager[Any]:
    """Within the block, autograd keeps `make` instead of `made`, and calls it when a gradient needs the tensor.

    Args:
        made: what `make` returned just now; views of it that cover it whole count as it.
        make: has to return the same bits, and to hold what it needs.
        worth_it: otherwise, and where checkpointing or offloading decides already what is kept, nothing changes.
    """
    if not worth_it or not torch.is_grad_enabled() or _others_decide():
        return nullcontext()
    place, size = made.data_ptr(), made.numel()

    def pack(kept: Tensor) -> Any:
        whole = kept.data_ptr() == place and kept.numel() == size and kept.is_contiguous()
        return kept.shape if whole else kept

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return make().view(packed)

    return saved_tensors_hooks(pack, unpack)


def _others_decide() -> bool:
    """Whether hooks of gradient checkpointing or activation offloading are in force."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None
