"""Where what a module runs comes from."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn


def forward_of(module: Any) -> Any:
    """Return the forward that a call of `module` runs: its instance's if one was put there, else its class's."""
    return vars(module).get("forward", type(module).forward)


def is_upstreams(module: Any, layer: nn.Module, ending: str) -> bool:
    """Whether `module`, a part of `layer`, is of a class of the layer's own modeling module and runs its forward untouched.

    `ending` is how the class's name ends.  A forward that something replaced or wrapped, on class or instance, is not.
    """
    owner: Any = type(layer)
    family, kind, runs = _modules_of(owner), type(module), forward_of(module)
    replaced = "forward" in vars(module) or runs.__module__ not in family or hasattr(runs, "__wrapped__")
    return not replaced and kind.__module__ in family and kind.__name__.endswith(ending)


@cache
def _modules_of(kind: type) -> frozenset[str]:
    """The names of the modules that a class and its bases come from."""
    return frozenset(base.__module__ for base in kind.__mro__)
