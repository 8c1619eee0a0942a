"""Recompute the input of a linear layer in the backward pass, if one cheap kernel computes that
input; and refuse to recompute layers whose patches are gone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FullyShardedDataParallel

from hf_packfree.errors import PatchConflict
from hf_packfree.graphs.checkpointing import FUNCTION, recomputes
from hf_packfree.models.base import Replacement
from hf_packfree.models.linear_weights import compute_dtype
from hf_packfree.models.plain_layers import plain_layers, project
from hf_packfree.models.state import PatchState
from hf_packfree.ops.fused import OP as FUSED


def recompute_saved(
    result: Tensor, compute: Callable[[], Tensor], enabled: bool
) -> AbstractContextManager[Any]:
    """Within the block, autograd saves `compute` instead of `result`, and calls `compute` when a
    gradient needs the tensor. A `result` that was changed in place since is saved itself.

    Args:
        result: the tensor that `compute` has just returned; a contiguous view of all its elements
            is replaced, too.
        compute: returns the values of `result` again, bit for bit; has to hold the tensors that it
            reads.
        enabled: if False, autograd saves as usual; so it does where checkpointing or offloading
            already decides what is saved.

    Raises:
        RuntimeError: in the backward pass, as torch raises without hooks, if a saved tensor was
            changed in place after it was saved.
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
        # torch compares versions only of tensors that are saved without hooks
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
    """Return a linear layer's output for the input `compute()`, [1, T, H, D], without saving that
    input for the backward pass.

    Args:
        compute: returns the layer's input; called with `projection`, the layer's weight with or
            without adapters, returns the layer's output.
        x: a tensor that `compute` reads, of the dtype and on the device of its result.
        backend: the backend of `compute`; its backward pass with `projection` may recompute the
            layer's input by itself.
        recompute: whether to recompute the input of layers that cannot be passed as `projection`,
            too (hooks, other adapters), see `recompute_saved`.
        state: the patched module's, by which the layer runs if it is not passed as `projection`.
    """
    fused = FUSED.backend(backend)
    alone = fused.recomputes and x.dtype == compute_dtype(x)
    layers = plain_layers(x, layer, adapters=fused.adapters) if alone else None
    if layers is not None:
        return compute(projection=layers[0])
    result = compute()
    with recompute_saved(result, compute, recompute):
        return project(result.flatten(2), layer, state=state)[0]


def keep_patches_until_backward(trunk: Any, output: Any) -> None:
    """Let the backward pass of a packed row raise if gradient checkpointing would run the text
    model's layers again after their patches were removed.

    Args:
        trunk: the text model.
        output: its output, whose hidden states' gradients come before the layers below run again.
    """
    if torch.compiler.is_compiling() or not any(map(_is_recomputed, trunk.layers)):
        return
    for hidden in (output.last_hidden_state, *(output.get("hidden_states") or ())):
        # a leaf is the caller's, and no layer is below it
        if hidden.requires_grad and not hidden.is_leaf:
            hidden.register_hook(lambda _: _refuse_removed_patches(trunk))


def _is_recomputed(layer: Any) -> bool:
    if isinstance(layer, FullyShardedDataParallel):
        # its `module` skips torch's wrapper
        layer = next(layer.children())
    found = recomputes(layer)
    # transformers' own recompute nothing in evaluation
    return found is not None and (found != FUNCTION or layer.training)


def _refuse_removed_patches(trunk: nn.Module) -> None:
    if not isinstance(trunk, Replacement):
        raise PatchConflict(
            "found patches removed between the forward pass of a row and its backward pass, in "
            f"which gradient checkpointing runs the layers of {type(trunk).__name__} again: they "
            "would read from one document into the next; wanted the patches in force until then; "
            "call remove_patches(model) after loss.backward()"
        )


def has_saved_tensor_hooks() -> bool:
    """Whether hooks of gradient checkpointing or activation offloading are in force, or hooks are
    forbidden (`torch.autograd.graph.disable_saved_tensors_hooks`).
    """
    allowed = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", None)
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return allowed is None or not allowed() or top is None or top(True) is not None
