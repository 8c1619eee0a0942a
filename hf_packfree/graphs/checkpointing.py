"""Gradient checkpointing in a graph: the second forward of recomputed layers is captured with the
backward pass, by torch's own `checkpoint`.

`checkpoint` saves the random state for the second run, which cannot be read during a capture. So
that is switched off, and layers that draw random numbers are not captured.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_packfree.graphs.captured_sequence import NotCapturable

FUNCTION = "_gradient_checkpointing_func"
"""The attribute of a layer with the function that recomputes it."""


def why_not(layer: Any) -> str | None:
    """Return why a layer's checkpointing cannot be captured, or None."""
    function = getattr(layer, FUNCTION, None)
    if getattr(layer, "gradient_checkpointing", False) and _settings(function) is None:
        return "layers are recomputed by another function than torch's checkpoint"
    return None


@contextmanager
def in_capture(module: nn.Module) -> Iterator[None]:
    """Make the recomputed layers of a module capturable in the block.

    Raises:
        NotCapturable: at the end of the block, if the layers drew random numbers.
    """
    layers: list[Any] = [
        each for each in module.modules() if getattr(each, "gradient_checkpointing", False)
    ]
    if not layers:
        yield
        return
    before, state = [getattr(layer, FUNCTION) for layer in layers], _random_state()
    others = {"use_reentrant": False, "preserve_rng_state": False}
    for layer, function in zip(layers, before, strict=True):
        settings = (_settings(function) or {}) | others
        setattr(layer, FUNCTION, functools.partial(checkpoint, **settings))
    try:
        yield
    finally:
        for layer, function in zip(layers, before, strict=True):
            setattr(layer, FUNCTION, function)
    if any(map(_differ, state, _random_state())):
        raise NotCapturable("layers draw random numbers (dropout), and are recomputed")


def are_alike(function: Any, other: Any) -> bool:
    """Whether two functions of layers are torch's `checkpoint` with equal keywords."""
    return _settings(function) is not None and _settings(function) == _settings(other)


def _settings(function: Any) -> dict[str, Any] | None:
    """Return the keywords with which a layer's function calls torch's `checkpoint`; None if it is
    another function.
    """
    if isinstance(function, functools.partial) and not function.args:
        return dict(function.keywords) if function.func is checkpoint else None
    return {} if function is checkpoint else None


def _random_state() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states += torch.cuda.get_rng_state_all()
    return states


def _differ(before: Tensor, after: Tensor) -> bool:
    return not torch.equal(before, after)
