"""A cached launcher of our Triton kernels: from a kernel's second launch on it skips Triton's
specialisation of the arguments.

Specialisation costs the host time at every launch, and a step of a few thousand tokens, with
hundreds of launches, waits for the host: 12% of a step of 4,096 tokens on an H200
(docs/performance.md). It calls a private interface of Triton, which
tests/ops/triton/test_launch.py compares with Triton's own launch. Settings of Triton that change
later (device asserts, instrumentation by its profiler) do not reach kernels that were launched
before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hf_packfree.ops.backend import installed
from hf_packfree.versions import LAUNCHED_TRITON

_ASSUMED = ["tt.divisibility", 16]
"""The only attribute that Triton compiles code for, besides types and integers that are 1; `_read`
gives arguments that lack it another kind.
"""
_INT32 = 2**31
Start = Callable[[tuple[int, ...], tuple[Any, ...], list[Any]], None]
_compiled: dict[tuple[Any, ...], Start] = {}
"""{(kernel, device, constants, the arguments' kinds): the function that launches the compiled
kernel}.
"""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run `kernel[grid](*arguments, **constants)` on the device of its first argument.

    Args:
        kernel: made by `triton.jit`.
        grid: programs along one to three dimensions.
        arguments: the first parameters of the kernel in order: tensors and None, and after these
            integers, floats and None.
        constants: its other parameters, all of them `tl.constexpr`, and Triton's options
            (num_warps, ...).
    """
    device = arguments[0].get_device()
    # Triton's interpreter
    if device < 0:
        kernel[grid](*arguments, **constants)
    elif device == torch.accelerator.current_device_index():
        _launch(kernel, grid, device, arguments, constants)
    else:
        with torch.cuda.device(device):
            _launch(kernel, grid, device, arguments, constants)


def _launch(
    kernel: Any,
    grid: tuple[int, ...],
    device: int,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
) -> None:
    kinds, values = _read(arguments, device)
    key = (id(kernel), device, *constants, *constants.values(), *kinds)
    start = _compiled.get(key)
    if start is not None:
        return start(grid, arguments, values)
    compiled = kernel[grid](*arguments, **constants)
    # None where a hook of Triton's prevented the compilation
    if compiled is not None and _assumes_no_more(compiled):
        rest = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
        _compiled[key] = _starter(compiled, device, rest)


def _starter(compiled: Any, device: int, rest: tuple[Any, ...]) -> Start:
    """Return a function that launches like `compiled[grid](*arguments, *rest)`, with everything
    that stays the same looked up once.
    """
    from triton import knobs
    from triton.runtime import driver

    runtime, stream_of = knobs.runtime, driver.active.get_current_stream
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def start(grid: tuple[int, ...], arguments: tuple[Any, ...], values: list[Any]) -> None:
        sizes = x, y, z = (*grid, 1, 1)[:3]
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        # a hook, such as a profiler's, is called at every launch
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            compiled[sizes](*arguments, *rest)
        else:
            run(x, y, z, stream_of(device), function, metadata, None, None, None, *values, *rest)

    return start


def _read(arguments: tuple[Any, ...], device: int) -> tuple[list[Any], list[Any]]:
    """Return the arguments' kinds, which differ wherever Triton would compile different code, and
    the values to launch with.

    The value of a tensor on this device is its address, which Triton would look up in the driver at
    every launch.
    """
    kinds: list[Any] = []
    values: list[Any] = []
    for value in arguments:
        kind: Any = type(value)
        if kind is Tensor or kind is Parameter:
            kind, where, address = value.dtype, value.get_device(), value.data_ptr()
            if where != device:
                kind = kind, where, address % 16
            else:
                kind, value = (kind, address % 16) if address % 16 else kind, address
        elif value is not None:
            if not isinstance(value, Tensor):
                break
            kind = kind, value.dtype, value.get_device(), value.data_ptr() % 16
        kinds.append(kind)
        values.append(value)
    numbers = arguments[len(values) :]
    return [*kinds, _kinds_of(*numbers)], [*values, *numbers]


# a row's layers repeat them
@lru_cache(maxsize=4096, typed=True)
def _kinds_of(*numbers: Any) -> tuple[Any, ...]:
    """Return the kinds of integers, floats and None."""
    # an address is nothing to remember
    assert not any(isinstance(value, Tensor) for value in numbers), "a tensor after a number"
    return tuple(
        (1 if value == 1 else (value % 16 == 0, -_INT32 <= value < _INT32))
        if type(value) is int
        # a bool, or of a subclass
        else ((type(value), value) if isinstance(value, int) else type(value))
        for value in numbers
    )


@cache
def is_known() -> bool:
    """Whether this launcher was compared with the installed release of Triton; other releases
    launch kernels themselves.
    """
    return (installed("triton") or "").startswith(LAUNCHED_TRITON)


def _assumes_no_more(compiled: Any) -> bool:
    """Whether compiled code holds for all arguments of its kinds: a later Triton may specialise on
    more than `_ASSUMED`.
    """
    if not is_known():
        return False
    try:
        source, declared = compiled.src, compiled.src.fn.constexprs
        fixed = [value for path, value in source.constants.items() if path[0] not in declared]
        assumed = [attribute for attributes in source.attrs.values() for attribute in attributes]
    except AttributeError:
        # a Triton that keeps these attributes elsewhere launches its kernels itself
        return False
    return all(value is None or value == 1 for value in fixed) and all(
        attribute == _ASSUMED for attribute in assumed
    )
