"""accelerate's context parallelism, which the Trainer reaches: it cuts rows for plain causal attention, and must not for us.

Every release from 1.10 to 1.15 prepares models in `Accelerator._prepare_cp`, by a context that cuts the batch's tensors, and
hooks that take masks away; 1.15 refuses Gated DeltaNet layers there, and the others train them wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from hf_packfree.errors import PatchConflict
from hf_packfree.parallel import ContextParallel


def cuts_its_rows(model: Any) -> bool:
    """Whether a model was patched with `context_parallel`."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return any(getattr(vars(module).get("packfree"), "context_parallel", None) is not None for module in modules)


def leave_rows_whole() -> Callable[[], None]:
    """Let accelerate prepare models that cut their rows themselves, without cutting them too; others as before.

    Returns:
        A function that undoes it.

    Raises:
        PatchConflict: this accelerate prepares models for context parallelism elsewhere.
    """
    import accelerate  # type: ignore[import-untyped]

    accelerator: Any = accelerate.Accelerator
    prepare = getattr(accelerator, "_prepare_cp", None)
    if prepare is None:
        raise PatchConflict(
            f"found accelerate {accelerate.__version__}, whose Accelerator has no _prepare_cp; wanted one from 1.10 to 1.15, "
            "where rows can be left whole; install accelerate 1.15"
        )

    def prepare_cp(self: Any, *args: Any) -> Any:
        if not any(map(cuts_its_rows, args)):
            return prepare(self, *args)
        self._cp_context = _whole
        return args

    accelerator._prepare_cp = prepare_cp

    def undo() -> None:
        if vars(accelerator).get("_prepare_cp") is prepare_cp:
            accelerator._prepare_cp = prepare

    return undo


def _whole(**buffers: Any) -> AbstractContextManager[None]:
    """Take the place of torch's context that cuts the batch's tensors."""
    return nullcontext()


def trainers_group(parallelism: Any) -> ContextParallel | None:
    """Return the group of a Trainer's `parallelism_config`, or None where it wants no context parallelism.

    Raises:
        PatchConflict: it wants sequence parallelism, which DeepSpeed would cut the rows for.
    """
    if getattr(parallelism, "sp_size", 1) > 1:
        raise PatchConflict(
            f"found sp_size={parallelism.sp_size}, for which DeepSpeed cuts rows without their documents; wanted cp_size, "
            "which exchanges heads too; set ParallelismConfig(cp_size=...)"
        )
    if getattr(parallelism, "cp_size", 1) < 2:
        return None
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped]

    return ContextParallel(AcceleratorState().device_mesh["cp"])
