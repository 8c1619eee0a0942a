"""The one place that speaks to torch.compile and torch.func: what plans on the host is left out of compiled graphs, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., object])


def uncompiled(function: _Function) -> _Function:
    """Mark a function that `torch.compile` calls as it is instead of tracing it.

    Such functions read boundaries or plan by them: traced, every row with other documents would be compiled anew.
    """
    return cast(_Function, torch.compiler.disable(function))


def uncompiled_when_called(function: _Function) -> _Function:
    """The same for a module that has to be imported at once: marking loads the compiler."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (uncompiled(function) if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return cast(_Function, call)


is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a transform of torch.func (grad, vmap) is in force: tensors may then hold others instead of numbers."""
