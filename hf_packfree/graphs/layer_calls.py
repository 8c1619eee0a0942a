"""What the layers of a text model are called with, and other forwards for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree.graphs.checkpointing import called_in_hooks, own_forward
from hf_packfree.graphs.settings import WEIGHTS, places_of, weights_at
from hf_packfree.packing import PackedSequence

Forward = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional ones, and those by name."""
_CONSTANTS = int, float, str, torch.dtype, torch.device, PackedSequence, type(None)
"""What is given to a layer in every row alike, or written where it reads it."""


@dataclass(frozen=True)
class LayerCall:
    """What one layer was called with, and which weights it read.

    Attributes:
        hidden: of the size and dtype of its input [1, T, D], without memory.
        follows: whether the input was the output of the layer before.
        arguments: everything else, positional and by name, with the tensors of `CallsOfLayers`.
        weights: of the sizes and dtypes of its gathered weights, without memory.
        is_plain: whether each of these was torch's own tensor.
    """

    hidden: Tensor
    follows: bool
    arguments: Arguments
    weights: list[Tensor]
    is_plain: bool


class CallsOfLayers:
    """What the layers were called with in one row. Tensors that are given to several of them, such
    as positions, are one tensor here, too.

    Attributes:
        why_not: why that cannot be replayed, or None.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        self.layers, self.calls = layers, list[LayerCall]()
        self.why_not: str | None = None
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self._called = 0
        self._why: list[str] = []
        self._last: Tensor | None = None

    def noting(self, number: int, own: Forward) -> Forward:
        """Return a forward that runs a layer's own, and notes the call."""

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._called += 1
            before = [*leaves_of((args, kwargs))]
            if len(self.calls) == number:
                weights = weights_at(places_of(self.layers[number]))
                self.calls.append(
                    LayerCall(
                        hidden=_without_memory(hidden_states),
                        follows=self._last is not None and is_same(hidden_states, self._last),
                        arguments=with_record(_changed((args, kwargs), self._copy), None),
                        weights=[*map(_without_memory, weights)],
                        is_plain={*map(type, weights)} <= {*WEIGHTS},
                    )
                )
            out = own(hidden_states, *args, **kwargs)
            self._why += _why_not_given(before, [*leaves_of((args, kwargs))])
            self._last = out if isinstance(out, Tensor) else None
            return out

        return forward

    def _copy(self, given: Tensor) -> Tensor:
        # with the tensor itself, whose id is nobody else's while it lives
        return self._copies.setdefault(id(given), (given, given.detach().clone()))[1]

    def end(self) -> None:
        """Note whether the layers were called one after the other, and forget the row's tensors."""
        follow = all(call.follows for call in self.calls[1:])
        if not len(self.calls) == len(self.layers) == self._called or not follow:
            self.why_not = "its layers do not follow each other"
        elif not all(call.is_plain for call in self.calls):
            self.why_not = "what FSDP gathers of its weights is sharded in another way, too"
        elif self._why:
            self.why_not = self._why[0]
        self._copies.clear()
        self._last = None

    def resized(self, tokens: int, other: int) -> CallsOfLayers | None:
        """Return what the layers are called with in rows of `other` tokens, given how many these
        rows have; None if the sizes of a tensor do not tell which of its dimensions is the row's.
        """
        found, copies = CallsOfLayers(self.layers), dict[int, Tensor]()
        found.why_not = self.why_not

        def change(x: Tensor) -> Tensor:
            if id(x) not in copies:
                copies[id(x)] = x.new_zeros([other if size == tokens else size for size in x.shape])
            return copies[id(x)]

        for call in self.calls:
            if any([*x.shape].count(tokens) > 1 for x in tensors_in(call.arguments)):
                return None
            hidden = call.hidden.new_empty(1, other, call.hidden.shape[-1])
            hidden.requires_grad_(call.hidden.requires_grad)
            arguments = _changed(call.arguments, change)
            found.calls.append(replace(call, hidden=hidden, arguments=arguments))
        return found


@contextmanager
def forwards_of(
    layers: nn.ModuleList, replaced: Callable[[int, Forward], Forward]
) -> Iterator[None]:
    """Within the block, calls of the layers run other forwards, in the same hooks."""
    called = [*map(called_in_hooks, layers)]
    before = {module: vars(module).get("forward") for module in (*layers, *called)}
    try:
        for number, (layer, its) in enumerate(zip(layers, called, strict=True)):
            own = own_forward(layer)
            if its is not layer:
                layer.forward = its.__call__
            its.forward = replaced(number, own)
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                vars(module).pop("forward", None)
            else:
                module.forward = forward


def leaves_of(value: Any) -> Iterator[Any]:
    """Yield what is in a call's arguments, and in the containers among them, in order."""
    if isinstance(value, dict):
        value = [*value.values()]
    if type(value) in (tuple, list):
        for each in value:
            yield from leaves_of(each)
    else:
        yield value


def tensors_in(arguments: Any) -> list[Tensor]:
    """Return the tensors among a call's arguments, in order."""
    return [leaf for leaf in leaves_of(arguments) if isinstance(leaf, Tensor)]


def constants_of(arguments: Arguments) -> Arguments:
    """Return a call's arguments without its tensors, and without the record."""
    return with_record(_changed(arguments, lambda _: None), None)


def _why_not_given(before: list[Any], after: list[Any]) -> Iterator[str]:
    """Yield why a layer that was given this cannot be replayed, given what is there afterwards."""
    if [*map(id, before)] != [*map(id, after)]:
        yield "a layer changes what it is given"
    for leaf in before:
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                yield "a layer is given more than one tensor with gradients"
        elif not isinstance(leaf, _CONSTANTS):
            yield f"a layer is given a {type(leaf).__name__}"


def _changed(value: Any, change: Callable[[Tensor], Tensor | None]) -> Any:
    """Return the value with its tensors changed, those in containers, too."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _changed(each, change) for name, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_changed(each, change) for each in value)
    return value


def with_record(arguments: Arguments, packed: PackedSequence | None) -> Arguments:
    """Return a layer's arguments with another record, or without."""
    args, kwargs = arguments
    return args, {**kwargs, "packed_sequence": packed}


def is_same(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements in memory."""
    return x.data_ptr() == other.data_ptr() and x.shape == other.shape and x.dtype == other.dtype


def _without_memory(x: Tensor) -> Tensor:
    like = torch.empty_like(x, device="meta", requires_grad=False)
    return like.requires_grad_(x.requires_grad)
