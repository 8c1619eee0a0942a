"""Not keeping for the backward pass what one cheap kernel makes again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_packfree.models.fusable import plain_weights, project
from hf_packfree.models.state import PatchState


def recompute_saved(made: Tensor, make: Callable[[], Tensor], worth_it: bool) -> AbstractContextManager[Any]:
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


def linear_with_recompute(
    make: Callable[..., Tensor], layer: Any, x: Tensor, *, remakes: bool, worth_it: bool, state: PatchState
) -> Tensor:
    """Return what a linear layer makes of `make()`, [1, T, H, D], without keeping that for the backward pass.

    Args:
        make: given `projection`, the layer's weight, it does the layer's work as well.
        x: what `make` reads, of the dtype and on the device of what it returns.
        remakes: whether `make` makes it again in a backward pass of its own, which joins it with the layer's.
        worth_it: see `recompute_saved`, which does it for layers that are more than their weight.
        state: of the module, for the linear layer where it is called by itself.
    """
    weights = plain_weights(x, layer) if remakes else None
    if weights is not None:
        return make(projection=weights[0])
    made = make()
    with recompute_saved(made, make, worth_it):
        return project(made.flatten(2), layer, state=state)[0]


def _others_decide() -> bool:
    """Whether hooks of gradient checkpointing or activation offloading are in force."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None
