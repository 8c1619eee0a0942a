"""torch.compile and torch.func: functions that plan on the host stay out of compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch.autograd import forward_ad

_Function = TypeVar("_Function", bound=Callable[..., object])


def uncompiled(function: _Function) -> _Function:
    """Keep a function out of `torch.compile`, which then calls it instead of tracing it.

    Functions that read boundaries, or plan from them, need this: traced, they would be compiled
    again for every row with other documents.
    """
    return cast(_Function, torch.compiler.disable(function))


def uncompiled_when_called(function: _Function) -> _Function:
    """`uncompiled` without loading the compiler when the function is defined, for modules that have
    to import fast.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (uncompiled(function) if torch.compiler.is_compiling() else function)(
            *args, **kwargs
        )

    return cast(_Function, call)


def is_transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap) is active, in which tensors may wrap others
    and hold no values, or a level of forward-mode differentiation, whose tangents our backward
    passes know nothing of.
    """
    in_func: bool = torch._C._are_functorch_transforms_active()
    return in_func or forward_ad._current_level >= 0
