"""Recompute the input of a linear layer in the backward pass, where one cheap kernel does it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_packfree.models.linear_weights import compute_dtype
from hf_packfree.models.plain_layers import plain_layers, project
from hf_packfree.models.state import PatchState
from hf_packfree.ops.fused import OP as FUSED


def recompute_saved(
    result: Tensor, compute: Callable[[], Tensor], enabled: bool
) -> AbstractContextManager[Any]:
    """Within the block, autograd keeps `compute` instead of `result`, and calls it when a gradient
    needs the tensor. What was changed in place since `compute` returned it is kept.

    Args:
        result: what `compute` has just returned; a view that covers all of it counts as it.
        compute: has to return the same tensor, bit for bit, and to hold what it needs.
        enabled: False, and wherever checkpointing or offloading already decides what is kept:
            nothing changes.

    Raises:
        RuntimeError: in the backward pass, as torch does without hooks, where a tensor that it
            needs was changed in place after it was kept.
    """
    if not enabled or not torch.is_grad_enabled() or has_saved_tensor_hooks():
        return nullcontext()
    address, size, version = result.data_ptr(), result.numel(), result._version

    def pack(saved: Tensor) -> Any:
        whole = saved.data_ptr() == address and saved.numel() == size and saved.is_contiguous()
        same = whole and saved._version == version
        return saved.shape if same else (saved, saved._version)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, torch.Size):
            with torch.no_grad():
                return compute().view(packed)
        saved, before = packed
        # torch compares them only where there are no hooks
        if saved._version != before:
            raise RuntimeError(
                f"found a tensor of shape {tuple(saved.shape)} that was changed in place "
                "between the forward pass and the backward pass, which needs it as it was; wanted "
                "it unchanged; call backward before optimizer.step() or other changes of weights"
            )
        return saved

    return saved_tensors_hooks(pack, unpack)


def linear_with_recompute(
    compute: Callable[..., Tensor],
    layer: Any,
    x: Tensor,
    *,
    backend: str,
    recompute: bool,
    state: PatchState,
) -> Tensor:
    """Return a linear layer's output for the input `compute()`, [1, T, H, D], which is not kept for
    the backward pass.

    Args:
        compute: called with `projection`, the layer's weight or that with adapters, it returns the
            layer's output instead.
        x: what `compute` reads, of the dtype and on the device of what it returns.
        backend: that of `compute`, whose backward pass with `projection` may recompute the layer's
            input by itself.
        recompute: whether to recompute it for any other layer too (hooks, other adapters), see
            `recompute_saved`.
        state: the module's, for a linear layer that is called by itself.
    """
    fused = FUSED.backend(backend)
    alone = fused.recomputes and x.dtype == compute_dtype(x)
    layers = plain_layers(x, layer, adapters=fused.adapters) if alone else None
    if layers is not None:
        return compute(projection=layers[0])
    result = compute()
    with recompute_saved(result, compute, recompute):
        return project(result.flatten(2), layer, state=state)[0]


def has_saved_tensor_hooks() -> bool:
    """Whether hooks of gradient checkpointing or activation offloading are in force, or hooks are
    forbidden (`torch.autograd.graph.disable_saved_tensors_hooks`).
    """
    allowed = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", None)
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return allowed is None or not allowed() or top is None or top(True) is not None
