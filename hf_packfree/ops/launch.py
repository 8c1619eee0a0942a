"""Launch our Triton kernels: what was compiled for arguments of one kind is called again without asking Triton which it is.

Asking is the host's work at every launch, and a step of a few thousand tokens, which has hundreds of them, waits for the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ASSUMED = ["tt.divisibility", 16]
"""What compiled code may rely on, and `_kinds` tells apart, beside types and integers that are 1."""
_INT32 = 2**31
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""By kernel, device, constants and the arguments' kinds: the compiled kernel, and the constants in the kernel's order."""


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
    elif device == torch.cuda.current_device():
        _launch(kernel, grid, device, arguments, constants)
    else:
        with torch.cuda.device(device):
            _launch(kernel, grid, device, arguments, constants)


def _launch(kernel: Any, grid: tuple[int, ...], device: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    key = (id(kernel), device, *constants, *constants.values(), *_kinds(arguments))
    found = _compiled.get(key)
    if found is not None:
        compiled, rest = found
        compiled[(*grid, 1, 1)](*arguments, *rest)
        return
    compiled = kernel[grid](*arguments, **constants)
    if compiled is not None and _assumes_no_more(compiled):  # None: a hook of Triton's kept it from compiling
        _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments):])


def _kinds(arguments: tuple[Any, ...]) -> list[Any]:
    """What Triton compiles the arguments for, told apart at least as finely as it does."""
    kinds: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            kinds.append(argument.dtype)
            if argument.data_ptr() % 16:
                kinds.append("odd")  # which says so of the tensor before it
        elif type(argument) is int:
            kinds.append(1 if argument == 1 else (argument % 16 == 0, -_INT32 <= argument < _INT32))
        else:
            kinds.append((bool, argument) if type(argument) is bool else type(argument))
    return kinds


def _assumes_no_more(compiled: Any) -> bool:
    """Whether the code holds for all arguments of the kinds it was compiled for: a later Triton may look at more."""
    try:
        source, declared = compiled.src, compiled.src.fn.constexprs
        fixed = [value for path, value in source.constants.items() if path[0] not in declared]
        assumed = [attribute for attributes in source.attrs.values() for attribute in attributes]
    except AttributeError:  # a Triton that says so elsewhere: it is asked every time
        return False
    return all(value is None or value == 1 for value in fixed) and all(attribute == _ASSUMED for attribute in assumed)


__all__ = ["launch"]
