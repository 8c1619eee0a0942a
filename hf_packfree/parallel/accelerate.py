"""accelerate's context parallelism, which the Trainer reaches: it cuts rows for plain causal attention, and must not for us.

Every release from 1.10 to 1.15 prepares models in `Accelerator._prepare_cp`, by a context that cuts the batch's tensors, and
hooks that take masks away; 1.15 refuses Gated DeltaNet layers there, and the others train them wrongly.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch import nn

from hf_packfree.errors import PatchConflict
from hf_packfree.parallel import ContextParallel


def cuts_its_rows(model: Any) -> bool:
    """Whether a model was patched with `context_parallel`."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return any(getattr(vars(module).get("packfree"), "context_parallel", None) is not None for module in modules)


class _Seam:
    """Stands in front of `Accelerator._prepare_cp` as long as there are models to train that cut their rows."""

    def __init__(self) -> None:
        self.models: WeakSet[nn.Module] = WeakSet()
        self._replaced: tuple[Any, Any] | None = None

    def open(self, accelerator: Any) -> None:
        if self._replaced is not None:
            return
        prepare = accelerator._prepare_cp

        def prepare_cp(self: Any, *args: Any) -> Any:
            models = [one for one in args if isinstance(one, nn.Module)]
            # batches come alone, before the model or, where only evaluation is wanted, without it
            ours = any(map(cuts_its_rows, models)) if models else vars(self).get("_cp_context", _whole) is _whole
            if not ours:
                return prepare(self, *args)
            self._cp_context = _whole
            self._prepare_cp = MethodType(prepare_cp, self)  # for more batches and runs, when the class is as it was
            return args

        self._replaced, accelerator._prepare_cp = (accelerator, prepare), prepare_cp

    def close(self) -> None:
        if self._replaced is not None:
            accelerator, prepare = self._replaced
            accelerator._prepare_cp, self._replaced = prepare, None


_seam = _Seam()


def leave_rows_whole(model: nn.Module) -> None:
    """Let accelerate prepare models that cut their rows themselves, without cutting them too; others as before.

    `cut_rows_again` undoes it; an accelerator that has prepared such a model goes on to leave that model's rows whole.

    Raises:
        PatchConflict: this accelerate prepares models for context parallelism elsewhere.
    """
    import accelerate  # type: ignore[import-untyped]

    if not hasattr(accelerate.Accelerator, "_prepare_cp"):
        raise PatchConflict(
            f"found accelerate {accelerate.__version__}, whose Accelerator has no _prepare_cp; wanted one from 1.10 to 1.15, "
            "where rows can be left whole; install accelerate 1.15"
        )
    _seam.open(accelerate.Accelerator)
    _seam.models.add(model)


def cut_rows_again(trained: nn.Module | None = None) -> None:
    """Give accelerate back as it was, unless models are still to be trained that are patched and not in this one."""
    done = set(() if trained is None else trained.modules())
    for model in list(_seam.models):
        if model in done or not cuts_its_rows(model):
            _seam.models.discard(model)
    if not _seam.models:
        _seam.close()


def _whole(**buffers: Any) -> AbstractContextManager[None]:
    """Take the place of torch's context that cuts the batch's tensors."""
    return nullcontext()


def trainers_group(parallelism: Any, given: ContextParallel | None = None) -> ContextParallel | None:
    """Return the group of a Trainer's `parallelism_config`, or None where it wants no context parallelism.

    A Trainer that wants sequence parallelism gets context parallelism instead, before it prepares anything: `sp_size` means
    DeepSpeed to accelerate, which cuts rows without their documents.

    Args:
        parallelism: the Trainer's, or None.
        given: what the user set; returned if it is the same group.

    Raises:
        PatchConflict: `sp_size` comes with DeepSpeed's engine, or with a number of processes that it does not divide; the given
            group is another one.
    """
    found = None if parallelism is None else _of_mesh(parallelism)
    if given is None or given.world == 1:
        return given or found
    ours, theirs = (None if one is None else dist.get_process_group_ranks(one.group) for one in (given, found))
    if ours != theirs:
        raise PatchConflict(
            f"found context_parallel with ranks {ours}, and a Trainer that gives the same batches to "
            f"{'no two ranks' if theirs is None else f'ranks {theirs}'}; wanted a group whose ranks get the same batches; set "
            f"ParallelismConfig(cp_size={given.world})"
        )
    return given


def _of_mesh(parallelism: Any) -> ContextParallel | None:
    """Return the group of a `parallelism_config`."""
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped]

    if getattr(parallelism, "sp_size", 1) > 1:
        parallelism = as_context_parallel(parallelism, AcceleratorState())
    if getattr(parallelism, "cp_size", 1) < 2:
        return None
    return ContextParallel(AcceleratorState().device_mesh["cp"])


def as_context_parallel(parallelism: Any, state: Any) -> Any:
    """Put `cp_size` where accelerate's state has `sp_size`, with the mesh that DeepSpeed would have had no use for.

    Args:
        parallelism: a `ParallelismConfig`.
        state: accelerate's, which is changed.

    Returns:
        The new `ParallelismConfig`.

    Raises:
        PatchConflict: see `trainers_group`.
    """
    size, processes = parallelism.sp_size, state.num_processes
    found = f"found sp_size={size}"
    if state.distributed_type == "DEEPSPEED":
        raise PatchConflict(
            f"{found} with a DeepSpeed configuration, whose engine would cut rows without their documents; wanted FSDP2 or "
            "DDP; leave DeepSpeed out, or set ParallelismConfig(cp_size=...) with fsdp=True"
        )
    if processes % parallelism.total_size:
        raise PatchConflict(f"{found} for {processes} processes; wanted sizes whose product divides them; change sp_size")
    shards = parallelism.dp_shard_size * (processes // parallelism.total_size)  # DeepSpeed takes the rest for data, unnamed
    ours = replace(parallelism, cp_size=size, sp_size=1, sp_handler=None, dp_shard_size=shards)
    state.parallelism_config, state.device_mesh = ours, ours.get_device_mesh(state.device.type)
    return ours
