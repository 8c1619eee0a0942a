"""Gradients of parameters that leave a graph without a copy.

In full training a copy would take memory as large as the weights, and be written in every step. But
the next replay of any graph of the pool overwrites the gradients. So before it,
`GradientBuffers.take_back` moves gradients that are in parameters' `.grad` (sums over several rows)
to memory of their own, and returns False if other code still holds one.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


class Address:
    """Bytes on a GPU, as an object with the CUDA array interface; alive while a tensor on these
    bytes is.

    Args:
        data: the address.
        size: the number of bytes.
        owner: the object that keeps the memory allocated.
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
    """Return a tensor at an address, with the size, strides and dtype of `like`, whose first
    element is there.
    """
    memory = torch.as_tensor(address, device=like.device).untyped_storage()
    # not a view, which would keep the memory's `Address` alive after `take_back` moved the tensor
    found = torch.empty(0, dtype=like.dtype, device=like.device)
    return found.set_(memory, 0, like.shape, like.stride())


def borrowed(x: Tensor) -> Tensor:
    """Return a tensor on the same memory without a reference to it, so that later captures may
    reuse the memory.
    """
    return tensor_at(Address(x.data_ptr(), _size(x), None), x)


class GradientBuffers:
    """The gradients of some parameters, in the memory that graphs write.

    Args:
        parameters: the parameters that the graphs read themselves.
        grads: for each parameter the captured gradient, or None.
        owner: the graphs, whose lifetime is that of the memory.
    """

    def __init__(
        self, parameters: Sequence[Tensor], grads: Sequence[Tensor | None], owner: Any
    ) -> None:
        self._parameters, self._owner = tuple(parameters), owner
        self._grads = [None if grad is None else borrowed(grad) for grad in grads]
        self._sizes = [0 if grad is None else _size(grad) for grad in self._grads]
        self._shared = _shared(self._grads)
        self._out: dict[int, weakref.ref[Address]] = {}

    def hand_out(self, number: int) -> Tensor | None:
        """Return a parameter's gradient of the last replay, given the number of the parameter; call
        `take_back` before the next replay.
        """
        grad, size = self._grads[number], self._sizes[number]
        if grad is None:
            return None
        place = grad.data_ptr()
        if place in self._shared:
            return grad.clone()
        address = Address(place, size, self._owner)
        self._out[place] = weakref.ref(address)
        return tensor_at(address, grad)

    def take_back(self) -> bool:
        """Move gradients that are in parameters' `.grad` to other memory; return whether the
        graph's memory is free then.
        """
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
        # in place, because other code may hold the same tensor as the parameter's gradient
        grad.data = grad.detach().clone()
        if (address := out()) is not None:
            # moved back: something else, such as a view, still uses the graph's memory, and has to
            # see what is added
            grad.data = tensor_at(address, grad).as_strided(shape, strides)

    def _is_out(self) -> bool:
        self._out = {place: out for place, out in self._out.items() if out() is not None}
        return bool(self._out)


def _size(x: Tensor) -> int:
    """Return the bytes from a tensor's first element to its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def _shared(grads: Sequence[Tensor | None]) -> set[int]:
    """Return the addresses of gradients that overlap with others."""
    spans = sorted((x.data_ptr(), x.data_ptr() + _size(x)) for x in grads if x is not None)
    pairs = [(begin, after) for (begin, end), (after, _) in pairwise(spans) if after < end]
    return {begin for pair in pairs for begin in pair}
