"""The checkpoint contract: parameters and sizes that have been the same in every release of a family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Sizes = dict[str, tuple[Any, Any]]
"""Name of a part: (what the module has, what its config says)."""


def size_of_linear(layer: Any) -> tuple[int, int]:
    """(out, in) features; adapters and quantised layers keep these names while their weights change shape."""
    return layer.out_features, layer.in_features


def size_of_norm(norm: Any) -> tuple[int, ...]:
    """Shape of the norm's weight."""
    return size_of(norm.weight)


def size_of(parameter: Any) -> tuple[int, ...]:
    """Shape of a parameter; one that DeepSpeed's ZeRO-3 has sharded is empty and keeps its own shape beside it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def broken_promises(layer: nn.Module, sizes_of: Callable[[Any], Sizes]) -> list[str]:
    """Return a sentence per part of `layer` that is missing or has another size than its config says."""
    try:
        sizes = sizes_of(layer)
    except AttributeError as missing:
        return [str(missing)]
    return [
        f"{part} is {found}, its config says {wanted}" for part, (found, wanted) in sizes.items() if found != wanted
    ]
