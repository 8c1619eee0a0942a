"""A padded batch that exists only once something reads it: [B, S, ...] held as the packed row [1, T, ...]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hf_packfree.packing.padding import repad, unpad
from hf_packfree.packing.record import PackedSequence

_aten = torch.ops.aten
_SAME_MEMORY = {_aten.detach.default, _aten.alias.default}
_CAST = _aten._to_copy.default


def lazy_repad(row: Tensor, packed: PackedSequence) -> Tensor:
    """Return `repad(row, packed)`, [B, S, ...], made when an operation first reads it and kept from then on.

    Shape, dtype, device and gradient are those of the padded tensor; detaching and casting read nothing.
    """
    lent: Tensor = _Lend.apply(row, packed)  # type: ignore[no-untyped-call]
    return lent


@dataclass(eq=False)
class _Held:
    row: Tensor
    packed: PackedSequence
    whole: Tensor | None = None

    def read(self) -> Tensor:
        if self.whole is None:
            self.whole = repad(self.row, self.packed)
        return self.whole


class LazyPaddedTensor(Tensor):
    """A tensor of the padded batch's shape without its memory."""

    held: _Held

    @staticmethod
    def __new__(cls, held: _Held) -> LazyPaddedTensor:
        """Make the empty shell of the padded shape."""
        shape = (*held.packed.batch_shape, *held.row.shape[2:])
        make = Tensor._make_wrapper_subclass
        shell: LazyPaddedTensor = make(cls, shape, dtype=held.row.dtype, device=held.row.device)
        shell.held = held
        return shell

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run any operation on the padded tensor, in which a change made in place stays."""
        kwargs = kwargs or {}
        if func in _SAME_MEMORY:
            return cls(args[0].held)
        if func is _CAST and args[0].held.whole is None and kwargs.keys() <= {"dtype", "non_blocking"}:
            return cls(_Held(func(args[0].held.row, **kwargs), args[0].held.packed))
        found = func(*tree_map_only(cls, _read, args), **tree_map_only(cls, _read, kwargs))
        return args[0] if func._schema.is_mutable and isinstance(args[0], cls) else found

    def numpy(self, *, force: bool = False) -> Any:
        """Return the padded tensor as an array, on the terms of every tensor."""
        return self.held.read().detach().requires_grad_(self.requires_grad).numpy(force=force)

    def share_memory_(self) -> Tensor:
        """Move the padded tensor to shared memory, and return it."""
        shared: Tensor = self.held.read().share_memory_()
        return shared

    def tolist(self) -> Any:
        """Return the padded tensor's values."""
        return self.held.read().tolist()


def _read(lazy: LazyPaddedTensor) -> Tensor:
    return lazy.held.read()


class _Lend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, row: Tensor, packed: PackedSequence) -> Tensor:
        ctx.packed = packed
        return LazyPaddedTensor(_Held(row.detach(), packed))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return unpad(grads[0], ctx.packed), None
