"""Gradients that leave a graph without a copy.

A graph of full training would keep a second set of them otherwise, as large as the weights, and
write it in every step. Where a replay wrote a gradient, the next replay of any graph of its pool
writes something else; so before it, `Gradients.take_back` moves what parameters alone still hold
(sums over several rows) to memory of its own, and says if somebody holds anything else.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


class Address:
    """Bytes on a GPU, in the words of Numba's CUDA array interface; alive as long as a tensor of
    them is.

    Args:
        data: where they begin.
        size: how many.
        owner: what keeps them allocated.
    """

    def __init__(self, data: int, size: int, owner: Any) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (data, False),
            "version": 3,
        }


def tensor_at(address: Address, like: Tensor) -> Tensor:
    """Return a tensor of an address, of the size, strides and dtype of another one, which begins
    there.
    """
    memory = torch.as_tensor(address, device=like.device).untyped_storage()
    # no view, which would hold the memory after `take_back` moved it
    found = torch.empty(0, dtype=like.dtype, device=like.device)
    return found.set_(memory, 0, like.shape, like.stride())


def borrowed(x: Tensor) -> Tensor:
    """Return a tensor on the same memory that keeps no reference to it: later captures in the pool
    may take it.
    """
    return tensor_at(Address(x.data_ptr(), _size(x), None), x)


class Gradients:
    """The gradients of some parameters, where a graph writes them.

    Args:
        parameters: what the graph reads by itself.
        grads: of each, as they were captured; None for those that have none.
        owner: the graph, without which the memory is gone.
    """

    def __init__(
        self, parameters: Sequence[Tensor], grads: Sequence[Tensor | None], owner: Any
    ) -> None:
        self._parameters, self._owner = tuple(parameters), owner
        self._grads = [None if grad is None else borrowed(grad) for grad in grads]
        self._sizes = [0 if grad is None else _size(grad) for grad in self._grads]
        self._shared = _shared(self._grads)
        self._out: dict[int, weakref.ref[Address]] = {}

    def hand_out(self) -> list[Tensor | None]:
        """Return the gradients that were written last; call `take_back` before the next are."""
        each = zip(self._grads, self._sizes, strict=True)
        return [None if grad is None else self._one(grad, size) for grad, size in each]

    def _one(self, grad: Tensor, size: int) -> Tensor:
        place = grad.data_ptr()
        if place in self._shared:
            return grad.clone()
        address = Address(place, size, self._owner)
        self._out[place] = weakref.ref(address)
        return tensor_at(address, grad)

    def take_back(self) -> bool:
        """Return whether the memory may be written: gradients of parameters are moved first."""
        if not self._is_out():
            return True
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._move(parameter.grad)
        return not self._is_out()

    def _move(self, grad: Tensor) -> None:
        out = self._out.get(grad.data_ptr())
        if out is None:
            return
        shape, strides = grad.shape, grad.stride()
        # in place: whoever holds this tensor holds the parameter's gradient
        grad.data = grad.detach().clone()
        if (address := out()) is not None:
            # back: a view of it has to see what is added to it
            grad.data = tensor_at(address, grad).as_strided(shape, strides)

    def _is_out(self) -> bool:
        self._out = {place: out for place, out in self._out.items() if out() is not None}
        return bool(self._out)


def _size(x: Tensor) -> int:
    """Return the bytes from a tensor's first element to its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def _shared(grads: Sequence[Tensor | None]) -> set[int]:
    """Return where gradients begin that overlap with others."""
    spans = sorted((x.data_ptr(), x.data_ptr() + _size(x)) for x in grads if x is not None)
    pairs = [(begin, after) for (begin, end), (after, _) in pairwise(spans) if after < end]
    return {begin for pair in pairs for begin in pair}
