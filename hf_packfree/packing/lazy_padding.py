"""A padded batch [B, S, ...] that is held as its packed row [1, T, ...] and padded when something first reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hf_packfree.errors import UnsupportedInput
from hf_packfree.packing.padding import repad, unpad
from hf_packfree.packing.record import PackedSequence

_aten = torch.ops.aten
_ALIASES = {_aten.detach.default, _aten.alias.default}
_DETACH = _aten.detach_.default
_CAST = _aten._to_copy.default


def lazy_repad(row: Tensor, packed: PackedSequence) -> Tensor:
    """Return `repad(row, packed)`, computed when an operation first reads it and kept from then on.

    Args:
        row: [1, T, ...].
        packed: the record of the row.

    Returns:
        [B, S, ...], with the shape, dtype, device and gradient of the padded tensor; detaching and casting read nothing.
    """
    lazy: LazyPaddedTensor = _LazyRepad.apply(row, packed)  # type: ignore[no-untyped-call]
    lazy.row = row
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
    """A tensor of the padded batch's shape without its memory; whatever takes a pointer gets that of the padded tensor."""

    source: _Source
    row: Tensor | None = None
    """What the loss is computed from, [1, T, ...] with its gradient; of the tensor that `lazy_repad` returns alone."""

    @staticmethod
    def __new__(cls, source: _Source) -> LazyPaddedTensor:
        """Make a tensor of the padded shape that has no memory of its own."""
        shape = (*source.packed.batch_shape, *source.row.shape[2:])
        make = Tensor._make_wrapper_subclass
        lazy: LazyPaddedTensor = make(cls, shape, dtype=source.row.dtype, device=source.row.device)
        # C++ that takes its pointer past the methods below raises then, instead of reading from address 0
        torch._C._set_throw_on_mutable_data_ptr(lazy)
        lazy.source = source
        return lazy

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run any operation on the padded tensor; an in-place operation changes that tensor, which later reads return."""
        kwargs = kwargs or {}
        if torch.Tag.inplace_view in func.tags and func is not _DETACH and isinstance(args[0], cls):
            raise UnsupportedInput(
                f"found {func.overloadpacket.__name__} of lazy logits, which changes their shape in place; wanted an operation "
                "that returns a tensor; call the one without the underscore, or patch with padded='full'"
            )
        if func in _ALIASES:
            return cls(args[0].source)
        if func is _CAST and args[0].source.padded is None and kwargs.keys() <= {"dtype", "non_blocking"}:
            return cls(_Source(func(args[0].source.row, **kwargs), args[0].source.packed))
        found = func(*tree_map_only(cls, _read, args), **tree_map_only(cls, _read, kwargs))
        return args[0] if func._schema.is_mutable and isinstance(args[0], cls) else found

    def _leaf(self) -> Tensor:
        """Return the padded tensor, an ordinary one that shares the memory of every other, without what computed it."""
        return self.source.read().detach().requires_grad_(self.requires_grad)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the padded tensor as an array, under the conditions of `Tensor.numpy`."""
        return self._leaf().numpy(force=force)

    def tolist(self) -> Any:
        """Return the padded tensor's values."""
        return self._leaf().tolist()

    def data_ptr(self) -> int:
        """Return the address of the padded tensor."""
        return self._leaf().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory of the padded tensor."""
        return self._leaf().untyped_storage()

    def share_memory_(self) -> Tensor:
        """Move the padded tensor to shared memory, and return it."""
        shared: Tensor = self.source.read().share_memory_()
        return shared

    def __dlpack__(self, **options: Any) -> Any:
        """Hand the padded tensor to another library."""
        return self._leaf().__dlpack__(**options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and save the padded tensor, as an ordinary one."""
        return self._leaf().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        """Copy the padded tensor; one with a history raises, as an ordinary one does."""
        return Tensor.__deepcopy__(self._leaf() if self.is_leaf else self, memo)  # type: ignore[no-untyped-call]

    @property
    def data(self) -> Tensor:
        """The same without a gradient."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        self.source = _Source(self.source.row, self.source.packed, values.detach().view(self.shape))

    def _before_the_loss(self) -> Tensor | None:
        """Return the row where it is still what this tensor holds: nothing was changed in place."""
        return self.row if self._version == 0 else None

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Call `hook` with the gradient of all that is computed from this tensor, the model's loss on the row included."""
        row, packed = self._before_the_loss(), self.source.packed
        if row is None:
            return super().register_hook(hook)  # type: ignore[no-untyped-call]

        def hook_of_row(grad: Tensor) -> Tensor | None:
            found = hook(repad(grad, packed))
            return None if found is None else unpad(found, packed)

        return row.register_hook(hook_of_row)

    def retain_grad(self) -> None:
        """Keep the gradient of all that is computed from this tensor, the model's loss on the row included."""
        row = self._before_the_loss()
        super().retain_grad() if row is None else row.retain_grad()

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        """Whether `retain_grad` was called."""
        row = self._before_the_loss()
        return super().retains_grad if row is None else row.retains_grad

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """What `retain_grad` keeps."""
        row = self._before_the_loss()
        if row is None:
            return super().grad
        return None if row.grad is None else repad(row.grad, self.source.packed)

    @grad.setter
    def grad(self, values: Tensor | None) -> None:
        row = self._before_the_loss()
        if row is None:
            Tensor.grad.__set__(self, values)  # type: ignore[attr-defined]
        else:
            row.grad = None if values is None else unpad(values, self.source.packed)


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
