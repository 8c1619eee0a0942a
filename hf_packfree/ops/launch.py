"""Launch our Triton kernels: what was compiled for arguments of one kind is started again without asking Triton which it is.

Asking is the host's work at every launch, and a step of a thousand tokens, which has hundreds of them, waits for the host.
What is switched on in Triton later (device asserts, instrumentation of its profiler) does not reach kernels that ran before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hf_packfree.ops.backend import installed

_KNOWN = ("3.6.", "3.7.")
"""The releases of Triton whose compiled kernels are started here; others are asked at every launch."""
_ASSUMED = ["tt.divisibility", 16]
"""What compiled code may rely on, and `_kinds` tells apart, beside types and integers that are 1."""
_INT32 = 2**31
Start = Callable[[tuple[int, ...], tuple[Any, ...]], None]
_compiled: dict[tuple[Any, ...], Start] = {}
"""By kernel, device, constants and the arguments' kinds: what starts the compiled kernel on a grid, with arguments."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run `kernel[grid](*arguments, **constants)` on the device of its first argument.

    Args:
        kernel: made by `triton.jit`.
        grid: programs along one to three dimensions.
        arguments: tensors, integers, floats and None, the first parameters of the kernel in order.
        constants: its other parameters, all of them `tl.constexpr`, and Triton's options (num_warps, ...).
    """
    device = arguments[0].get_device()
    if device < 0:  # Triton's interpreter
        kernel[grid](*arguments, **constants)
    elif device == torch.accelerator.current_device_index():
        _launch(kernel, grid, device, arguments, constants)
    else:
        with torch.cuda.device(device):
            _launch(kernel, grid, device, arguments, constants)


def _launch(kernel: Any, grid: tuple[int, ...], device: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    key = (id(kernel), device, *constants, *constants.values(), *_kinds(arguments))
    start = _compiled.get(key)
    if start is not None:
        return start(grid, arguments)
    compiled = kernel[grid](*arguments, **constants)
    if compiled is not None and _assumes_no_more(compiled):  # None: a hook of Triton's kept it from compiling
        rest = tuple(constants[name] for name in kernel.arg_names[len(arguments):])
        _compiled[key] = _starter(compiled, device, rest)


def _starter(compiled: Any, device: int, rest: tuple[Any, ...]) -> Start:
    """Return what does as `compiled[grid](*arguments, *rest)` and looks nothing up that stays the same."""
    from triton import knobs
    from triton.runtime import driver

    runtime, stream_of = knobs.runtime, driver.active.get_current_stream
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def start(grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        sizes = x, y, z = (*grid, 1, 1)[:3]
        if _watched(runtime):
            compiled[sizes](*arguments, *rest)
        else:
            run(x, y, z, stream_of(device), function, metadata, None, None, None, *arguments, *rest)

    return start


def _watched(runtime: Any) -> bool:
    """Whether somebody, a profiler, wants to hear of every launch."""
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _kinds(arguments: tuple[Any, ...]) -> list[Any]:
    """What Triton compiles the arguments for, told apart at least as finely as it does."""
    kinds: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            kinds.append(argument.dtype)
            if argument.data_ptr() % 16:
                kinds.append("odd")  # which says so of the tensor before it
        elif isinstance(argument, bool):
            kinds.append((bool, argument))
        elif isinstance(argument, int):
            kinds.append(1 if argument == 1 else (argument % 16 == 0, -_INT32 <= argument < _INT32))
        else:
            kinds.append(type(argument))
    return kinds


@cache
def _is_known() -> bool:
    return (installed("triton") or "").startswith(_KNOWN)


def _assumes_no_more(compiled: Any) -> bool:
    """Whether the code holds for all arguments of the kinds it was compiled for: a later Triton may look at more."""
    if not _is_known():
        return False
    try:
        source, declared = compiled.src, compiled.src.fn.constexprs
        fixed = [value for path, value in source.constants.items() if path[0] not in declared]
        assumed = [attribute for attributes in source.attrs.values() for attribute in attributes]
    except AttributeError:  # a Triton that says so elsewhere: it is asked every time
        return False
    return all(value is None or value == 1 for value in fixed) and all(attribute == _ASSUMED for attribute in assumed)


__all__ = ["launch"]
