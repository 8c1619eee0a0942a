"""A padded batch [B, S, ...] that is held as its packed row [1, T, ...] and padded when something first reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hf_packfree.packing.padding import repad, unpad
from hf_packfree.packing.record import PackedSequence

_aten = torch.ops.aten
_ALIASES = {_aten.detach.default, _aten.alias.default}
_CAST = _aten._to_copy.default


def lazy_repad(row: Tensor, packed: PackedSequence) -> Tensor:
    """Return `repad(row, packed)`, computed when an operation first reads it and kept from then on.

    Args:
        row: [1, T, ...].
        packed: the record of the row.

    Returns:
        [B, S, ...], with the shape, dtype, device and gradient of the padded tensor; detaching and casting read nothing.
    """
    lazy: Tensor = _LazyRepad.apply(row, packed)  # type: ignore[no-untyped-call]
    return lazy


@dataclass(eq=False)
class _Source:
    """The row, and the padded batch once it was read."""

    row: Tensor
    packed: PackedSequence
    padded: Tensor | None = None

    def read(self) -> Tensor:
        if self.padded is None:
            self.padded = repad(self.row, self.packed)
        return self.padded


class LazyPaddedTensor(Tensor):
    """A tensor of the padded batch's shape without its memory."""

    source: _Source

    @staticmethod
    def __new__(cls, source: _Source) -> LazyPaddedTensor:
        """Make a tensor of the padded shape that has no memory of its own."""
        shape = (*source.packed.batch_shape, *source.row.shape[2:])
        make = Tensor._make_wrapper_subclass
        lazy: LazyPaddedTensor = make(cls, shape, dtype=source.row.dtype, device=source.row.device)
        lazy.source = source
        return lazy

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run any operation on the padded tensor; an in-place operation changes that tensor, which later reads return."""
        kwargs = kwargs or {}
        if func in _ALIASES:
            return cls(args[0].source)
        if func is _CAST and args[0].source.padded is None and kwargs.keys() <= {"dtype", "non_blocking"}:
            return cls(_Source(func(args[0].source.row, **kwargs), args[0].source.packed))
        found = func(*tree_map_only(cls, _read, args), **tree_map_only(cls, _read, kwargs))
        return args[0] if func._schema.is_mutable and isinstance(args[0], cls) else found

    def numpy(self, *, force: bool = False) -> Any:
        """Return the padded tensor as an array, under the conditions of `Tensor.numpy`."""
        return self.source.read().detach().requires_grad_(self.requires_grad).numpy(force=force)

    def share_memory_(self) -> Tensor:
        """Move the padded tensor to shared memory, and return it."""
        shared: Tensor = self.source.read().share_memory_()
        return shared

    def tolist(self) -> Any:
        """Return the padded tensor's values."""
        return self.source.read().tolist()


def _read(lazy: LazyPaddedTensor) -> Tensor:
    return lazy.source.read()


class _LazyRepad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, row: Tensor, packed: PackedSequence) -> Tensor:
        ctx.packed = packed
        return LazyPaddedTensor(_Source(row.detach(), packed))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return unpad(grads[0], ctx.packed), None
