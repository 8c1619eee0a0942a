"""Gradient checkpointing in a graph: the second forward of recomputed layers is captured with the
backward pass, by torch's own `checkpoint`.

`checkpoint` saves the random state for the second run, which cannot be read during a capture. So
that is switched off, dropout draws its masks from seeds instead (`hf_packfree.ops.seeds`), and
layers that draw other random numbers are not captured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
)
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import dropout
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from hf_packfree.graphs.captured_sequence import NotCapturable
from hf_packfree.ops.dropout import dropout as seeded_dropout
from hf_packfree.ops.seeds import Seeds

Contexts = Callable[[], tuple[AbstractContextManager[Any], ...]]
FUNCTION = "_gradient_checkpointing_func"
"""The attribute of a layer of transformers with the function that recomputes it."""


def recomputes(layer: Any) -> str | None:
    """Return the attribute of a layer, or of torch's wrapper around one, with the function that
    recomputes it; None: it is not recomputed.
    """
    if isinstance(layer, CheckpointWrapper):
        return "checkpoint_fn"
    # a wrapper has the attributes of what it wraps
    return FUNCTION if vars(layer).get("gradient_checkpointing") else None


def called_in_hooks(layer: Any) -> Any:
    """Return what the hooks that gather weights are around: the layer, or what torch's wrapper
    wraps, where that was sharded, as accelerate does; it shards the wrapper, too, but without
    weights.
    """
    runs = vars(layer).get("forward", type(layer).forward)
    # a reentrant one hands keywords over as positional arguments
    if (
        runs is not CheckpointWrapper.forward
        or layer.checkpoint_impl is not CheckpointImpl.NO_REENTRANT
    ):
        return layer
    inner = next(layer.children())
    return inner if isinstance(inner, FSDPModule) else layer


def own_forward(layer: Any) -> Callable[..., Any]:
    """Return what a layer runs within FSDP2's hooks, which recomputes what the layer recomputes."""
    called = called_in_hooks(layer)
    forward: Callable[..., Any] = called.forward
    if called is layer:
        return forward
    return lambda *args, **kwargs: layer.checkpoint_fn(forward, *args, **kwargs)


def why_not(layer: Any) -> str | None:
    """Return why a layer's checkpointing cannot be captured, or None."""
    if isinstance(layer, OffloadWrapper):
        return "activations are offloaded"
    name = recomputes(layer)
    if name is not None and _settings(getattr(layer, name, None)) is None:
        return "layers are recomputed by another function than torch's checkpoint"
    return None


@contextmanager
def in_capture(module: nn.Module, has_gradients: bool, seeds: Seeds) -> Iterator[None]:
    """Make the recomputed layers of a module capturable in the block.

    Args:
        has_gradients: whether what the layers are given has gradients.
        seeds: those in use, of which each second run takes the first one's.

    Raises:
        NotCapturable: without a graph the layers would get no gradients; at the end of the block,
            if they drew random numbers other than dropout's.
    """
    named = ((layer, recomputes(layer)) for layer in module.modules())
    layers = [(layer, name, getattr(layer, name)) for layer, name in named if name is not None]
    if not layers:
        yield
        return
    if not has_gradients and any(_is_reentrant(function) for _, _, function in layers):
        raise NotCapturable(
            "layers are recomputed with use_reentrant=True from inputs without gradients"
        )
    state = _random_state()
    # `debug` takes no `context_fn`
    others = {"use_reentrant": False, "preserve_rng_state": False, "debug": False}

    def contexts() -> tuple[AbstractContextManager[Any], ...]:
        return tuple(_within(each, _Dropout(seeds)) for each in seeds.of_both_runs())

    try:
        for layer, name, function in layers:
            settings = (_settings(function) or {}) | others
            settings["context_fn"] = _both(contexts, settings.get("context_fn"))
            setattr(layer, name, functools.partial(checkpoint, **settings))
        yield
    finally:
        for layer, name, function in layers:
            setattr(layer, name, function)
    if any(map(_differ, state, _random_state())):
        raise NotCapturable("layers draw random numbers, and are recomputed")


def _both(contexts: Contexts, others: Contexts | None) -> Contexts:
    """Return a `context_fn` of `checkpoint` whose contexts are those of both, if there are two."""
    if others is None:
        return contexts
    return lambda: tuple(_within(*pair) for pair in zip(contexts(), others(), strict=True))


@contextmanager
def _within(
    first: AbstractContextManager[Any], second: AbstractContextManager[Any]
) -> Iterator[None]:
    with first, second:
        yield


class _Dropout(TorchFunctionMode):
    """Lets `torch.nn.functional.dropout`, which PEFT's own layers call, draw from seeds."""

    def __init__(self, seeds: Seeds) -> None:
        super().__init__()
        self._seeds = seeds

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is not dropout or not given.get("training") or given.get("inplace"):
            return func(*args, **given)
        x, probability = args[0], given["p"]
        return seeded_dropout(x, self._seeds.take(x.device), probability) if probability else x


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


def _is_reentrant(function: Any) -> bool:
    """Whether layers have gradients only if their input has."""
    # which is torch's default
    return (_settings(function) or {}).get("use_reentrant") is not False


def _random_state() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states += torch.cuda.get_rng_state_all()
    return states


def _differ(before: Tensor, after: Tensor) -> bool:
    return not torch.equal(before, after)
