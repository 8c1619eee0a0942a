"""accelerate's context parallelism, which the Trainer switches on: accelerate cuts rows for plain
causal attention, and has to leave the rows of patched models whole.

Every release of accelerate from 1.10 to 1.15 prepares models in `Accelerator._prepare_cp`, with a
context that cuts the batch's tensors and hooks that remove masks. accelerate 1.15 refuses Gated
DeltaNet layers in that method, and earlier releases train such layers wrongly. The Trainer takes
`parallelism_config` from accelerate 1.12 on.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import MethodType
from typing import Any, Literal
from weakref import WeakSet

import torch.distributed as dist
from torch import nn

from hf_packfree.errors import PatchConflict
from hf_packfree.parallel import ContextParallel


def cuts_its_rows(model: Any) -> bool:
    """Whether a model was patched with `context_parallel`, so that it cuts its rows itself."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return any(
        getattr(vars(module).get("packfree"), "context_parallel", None) is not None
        for module in modules
    )


class _Seam:
    """Replaces `Accelerator._prepare_cp` as long as there are models to train that cut their rows
    themselves.
    """

    def __init__(self) -> None:
        self.models: WeakSet[nn.Module] = WeakSet()
        self._replaced: tuple[Any, Any] | None = None

    def open(self, accelerator: Any) -> None:
        if self._replaced is not None:
            return
        prepare = accelerator._prepare_cp

        def prepare_cp(self: Any, *args: Any) -> Any:
            models = [one for one in args if isinstance(one, nn.Module)]
            # batches are prepared in a call of their own, before the model's or, for evaluation
            # only, without one
            ours = (
                any(map(cuts_its_rows, models))
                if models
                else vars(self).get("_cp_context", _whole) is _whole
            )
            if not ours:
                return prepare(self, *args)
            self._cp_context = _whole
            _check_context(self)
            # this instance prepares more batches and runs after the class has its own method again
            self._prepare_cp = MethodType(prepare_cp, self)
            _prepared.update(models)
            return args

        self._replaced, accelerator._prepare_cp = (accelerator, prepare), prepare_cp

    def close(self) -> None:
        if self._replaced is not None:
            accelerator, prepare = self._replaced
            accelerator._prepare_cp, self._replaced = prepare, None


_seam = _Seam()
_prepared: WeakSet[nn.Module] = WeakSet()
"""Models that an accelerator prepared without cutting their rows."""


def leave_rows_whole(model: nn.Module) -> None:
    """Keep accelerate from cutting the rows of a model that cuts its rows itself; other models are
    prepared as before.

    `cut_rows_again` undoes this; an accelerator that has prepared such a model still leaves its
    rows whole.

    Raises:
        PatchConflict: the installed accelerate has no `Accelerator._prepare_cp`.
    """
    import accelerate  # type: ignore[import-untyped]

    if not hasattr(accelerate.Accelerator, "_prepare_cp"):
        raise _unknown("has no _prepare_cp")
    _seam.open(accelerate.Accelerator)
    _seam.models.add(model)


def refuse_unreadable_launch() -> None:
    """Refuse a `ParallelismConfig` of `accelerate launch` that the Trainer cannot read, because
    accelerate is too old.

    Raises:
        PatchConflict: accelerate is 1.10 or 1.11, whose `ParallelismConfig` lacks attributes that
            the Trainer reads.
    """
    import accelerate

    launched = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true"
    if launched and not hasattr(accelerate.ParallelismConfig, "sp_enabled"):
        raise _unknown(
            "takes a ParallelismConfig from `accelerate launch` that the Trainer cannot read"
        )


def refuse_rows_cut_twice(model: nn.Module) -> None:
    """Refuse to train a model on rows that accelerate cuts, because `_prepare_cp` was not replaced
    when accelerate prepared the model.

    Raises:
        PatchConflict: accelerate runs with `cp_size` above 1, and did not prepare this model by the
            replaced `_prepare_cp`.
    """
    if getattr(parallelism_in_force(), "cp_size", 1) > 1 and not any(
        module in _prepared for module in model.modules()
    ):
        raise _unknown("prepared a model for context parallelism without _prepare_cp")


def cut_rows_again(trained: nn.Module | None = None) -> None:
    """Restore accelerate's `_prepare_cp`, unless patched models other than `trained` are still to
    be trained.
    """
    done = set(() if trained is None else trained.modules())
    for model in list(_seam.models):
        if model in done or not cuts_its_rows(model):
            _seam.models.discard(model)
    if not _seam.models:
        _seam.close()


def _check_context(accelerator: Any) -> None:
    """Refuse an accelerator that does not enter the replaced context, and so cuts rows in another
    way.
    """
    entered = []

    def context(**buffers: Any) -> AbstractContextManager[None]:
        entered.append(buffers)
        return nullcontext()

    accelerator._cp_context = context
    with accelerator.maybe_context_parallel():
        accelerator._cp_context = _whole
    if not entered:
        raise _unknown("does not enter _cp_context to cut rows")


def _unknown(found: str) -> PatchConflict:
    import accelerate

    return PatchConflict(
        f"found accelerate {accelerate.__version__}, whose Accelerator {found}; wanted one from "
        "1.12 to 1.15, where rows can be left whole; pip install 'accelerate==1.15.*'"
    )


def _whole(**buffers: Any) -> AbstractContextManager[None]:
    """Replace torch's context that cuts the batch's tensors; leave the tensors whole."""
    return nullcontext()


def parallelism_in_force() -> Any:
    """Return accelerate's `ParallelismConfig`, from the Trainer or from `accelerate launch`, or
    None.
    """
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped]

    return getattr(AcceleratorState(), "parallelism_config", None)


def trainers_group(
    parallelism: Any, given: ContextParallel | Literal["auto"] | None = "auto"
) -> ContextParallel | None:
    """Return the group of a Trainer's `parallelism_config`, or None if it asks for no context
    parallelism.

    A Trainer that asks for sequence parallelism gets context parallelism instead, before it
    prepares anything: for accelerate, `sp_size` means DeepSpeed, which cuts rows without their
    documents.

    Args:
        parallelism: see `parallelism_in_force`.
        given: the user's setting: a group, which has to have the same ranks; "auto"; or None, which
            refuses rows that ranks share.

    Raises:
        PatchConflict: `sp_size` is used with DeepSpeed's engine, or the sizes' product does not
            divide the number of processes; the given group has other ranks, or is None although
            ranks share rows.
    """
    if given is None:
        _refuse_shared(parallelism)
        return None
    found = None if parallelism is None else _of_mesh(parallelism)
    if given == "auto":
        return found
    if found is None and given.world == 1:
        return given
    ours, theirs = (
        None if one is None else dist.get_process_group_ranks(one.group) for one in (given, found)
    )
    if ours != theirs:
        raise PatchConflict(
            f"found context_parallel with ranks {ours}, and a Trainer that gives the same batches "
            f"to {'no two ranks' if theirs is None else f'ranks {theirs}'}; wanted a group whose "
            f"ranks get the same batches; set ParallelismConfig(cp_size={given.world})"
        )
    return given


def _refuse_shared(parallelism: Any) -> None:
    """Refuse rows that accelerate or DeepSpeed would cut; before accelerate 1.15, training on them
    is wrong without an error.
    """
    for size in ("cp_size", "sp_size"):
        if (found := getattr(parallelism, size, 1)) > 1:
            raise PatchConflict(
                f"found context_parallel=None with {size}={found}, which cuts rows without their "
                "documents; wanted rows that the model cuts, or whole ones; pass "
                f"PackFreeCallback(context_parallel='auto'), or set {size}=1"
            )


def _of_mesh(parallelism: Any) -> ContextParallel | None:
    """Return the settings for the context-parallel group of a `parallelism_config`, or None without
    one.
    """
    from accelerate.state import AcceleratorState

    if getattr(parallelism, "sp_size", 1) > 1:
        parallelism = as_context_parallel(parallelism, AcceleratorState())
    if getattr(parallelism, "cp_size", 1) < 2:
        return None
    return ContextParallel(AcceleratorState().device_mesh["cp"])


def as_context_parallel(parallelism: Any, state: Any) -> Any:
    """Replace `sp_size` by `cp_size` in accelerate's state, and give the state the device mesh that
    it lacks with `sp_size`.

    Args:
        parallelism: a `ParallelismConfig`.
        state: accelerate's state, which is changed.

    Returns:
        The new `ParallelismConfig`.

    Raises:
        PatchConflict: see `trainers_group`.
    """
    size, processes = parallelism.sp_size, state.num_processes
    found = f"found sp_size={size}"
    if state.distributed_type == "DEEPSPEED":
        raise PatchConflict(
            f"{found} with a DeepSpeed configuration, whose engine would cut rows without their "
            "documents; wanted FSDP2 or "
            "DDP; leave DeepSpeed out, or set ParallelismConfig(cp_size=...) with fsdp=True"
        )
    if processes % parallelism.total_size:
        raise PatchConflict(
            f"{found} for {processes} processes; wanted sizes whose product divides them; change "
            "sp_size"
        )
    # for DeepSpeed, the remaining processes are data parallel without a size of their own
    shards = parallelism.dp_shard_size * (processes // parallelism.total_size)
    ours = replace(parallelism, cp_size=size, sp_size=1, sp_handler=None, dp_shard_size=shards)
    state.parallelism_config, state.device_mesh = ours, ours.get_device_mesh(state.device.type)
    return ours


def refuse_cut_rows(layer: nn.Module) -> None:
    """Refuse an attention layer that accelerate has prepared for context parallelism, recognised by
    the name of accelerate's hook.

    Raises:
        PatchConflict: the layer has such a hook.
    """
    hooks = layer._forward_pre_hooks.values()
    if any(
        getattr(hook, "__qualname__", "").startswith("_attach_context_parallel_hooks")
        for hook in hooks
    ):
        raise PatchConflict(
            "found a model that accelerate prepared with cp_size, which cuts rows without their "
            "documents; wanted rows that the model cuts; pass "
            "Trainer(callbacks=[PackFreeCallback()]), or, in a loop of your own, call "
            "apply_patches(model, context_parallel=mesh['cp']) and "
            "hf_packfree.parallel.accelerate.leave_rows_whole(model) before "
            "accelerator.prepare(model)"
        )
