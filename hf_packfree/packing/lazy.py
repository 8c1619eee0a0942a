"""A tensor whose shape, dtype and gradient are known at once, and whose values are computed when
something first reads them.

`lazy_repad` makes one kind: a padded batch [B, S, ...] that is held as its row [1, T, ...].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_packfree.errors import UnsupportedInput
from hf_packfree.packing.compiling import uncompiled_when_called
from hf_packfree.packing.padding import repad, unpad
from hf_packfree.packing.record import PackedSequence

_aten = torch.ops.aten
_ALIASES = {_aten.detach.default, _aten.alias.default}
_DETACH = _aten.detach_.default
_VIEW = _aten.view.default
CAST = _aten._to_copy.default
_CLONE = _aten.clone.default


@dataclass(frozen=True)
class Fingerprint:
    """A fingerprint that tells whether a tensor was changed in place.

    A tensor's version counts in-place operations, but fused optimizers, `.data` and kernels of
    other packages write without raising it. So the fingerprint also holds one element of every row
    and of every column.
    """

    version: int
    elements: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> Fingerprint:
        """Take the fingerprint of a tensor [..., rows, columns], or of a vector with all its
        elements.
        """
        return cls(tensor._version, _elements(tensor).clone())

    def fits(self, tensor: Tensor) -> bool:
        """Whether the same tensor is unchanged since."""
        return tensor._version == self.version and self.fits_copy(tensor)

    def fits_copy(self, tensor: Tensor) -> bool:
        """Whether another tensor of the same shape holds the same elements, NaN included."""
        found = _elements(tensor).contiguous()
        return found.dtype == self.elements.dtype and torch.equal(
            found.view(torch.uint8), self.elements.view(torch.uint8)
        )


def _elements(tensor: Tensor) -> Tensor:
    """Return the elements of a diagonal through [..., rows, columns]: every row and every column is
    sampled.
    """
    step = max(tensor.shape[-1] - 1, 1) if tensor.ndim > 1 else 1
    return tensor.detach().reshape(-1)[::step]


@dataclass(eq=False)
class Origin:
    """Where a lazy tensor's values come from.

    Attributes:
        shape, dtype, device: of the lazy tensor.
        make: computes the values, without a graph; raises if its inputs were modified since.
        values: the result of `make`; None until something reads it.
        changed: whether `values` may differ from `make`'s result: an operation changed them, or
            other code has their address.
        onward: for a gradient: a function that returns the gradients that follow from it without
            its values, or None; see `hf_packfree.ops.loss`.
        cast_of: the source that this one is a cast of, or None.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    make: Callable[[], Tensor]
    values: Tensor | None = None
    changed: bool = False
    onward: Callable[..., Any] | None = None
    cast_of: Origin | None = None

    # traced, versions of tensors are others, and all would be found changed
    @uncompiled_when_called
    def read(self) -> Tensor:
        """Return the values."""
        if self.values is None:
            self.values = self.make()
        return self.values

    def cast(self, dtype: torch.dtype) -> Origin:
        """Return a source of these values in another dtype, which computes them anew."""
        made = Origin(self.shape, dtype, self.device, lambda: self.make().to(dtype), cast_of=self)
        made.onward = self.onward
        return made

    @property
    def not_widened(self) -> Origin:
        """The source that this one is a cast to a wider dtype of, or else this one: what computes
        in fp32 gets the same from both.
        """
        before = self.cast_of
        if before is None or torch.promote_types(before.dtype, self.dtype) != self.dtype:
            return self
        return before


class LazyTensor(Tensor):
    """A tensor without memory until something reads it; code that asks for its pointer gets that of
    its values.
    """

    source: Origin

    @staticmethod
    def __new__(cls, source: Origin) -> LazyTensor:
        """Make a tensor that has no memory of its own."""
        lazy: LazyTensor = Tensor._make_wrapper_subclass(
            cls, source.shape, dtype=source.dtype, device=source.device
        )
        # C++ that takes the pointer without the methods below now raises, instead of reading
        # address 0
        torch._C._set_throw_on_mutable_data_ptr(lazy)
        lazy.source = source
        return lazy

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run any operation on the values; an in-place operation changes the values that later
        reads return.
        """
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():
            # values may have been made outside of inference mode, and a view of them must not be an
            # inference tensor
            with torch.inference_mode(False), torch.no_grad():
                return cls.__torch_dispatch__(func, types, args, kwargs)
        if (
            torch.Tag.inplace_view in func.tags
            and func is not _DETACH
            and isinstance(args[0], LazyTensor)
        ):
            raise UnsupportedInput(
                f"found {func.overloadpacket.__name__} of lazy logits, which changes their shape "
                "in place; wanted an operation that returns a tensor; call the one without the "
                "underscore"
            )
        if _is_alias(func, args):
            return type(args[0])(args[0].source)
        if _copies_unread(func, args) and kwargs.keys() <= {"dtype", "non_blocking"}:
            return type(args[0])(args[0].source.cast(kwargs.get("dtype") or args[0].dtype))
        found = func(
            *tree_map_only(LazyTensor, _read, args), **tree_map_only(LazyTensor, _read, kwargs)
        )
        if not func._schema.is_mutable:
            return found
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, LazyTensor):
                tensor.source.changed = True
        return args[0] if isinstance(args[0], LazyTensor) else found

    def _leaf(self) -> Tensor:
        """Return the values as an ordinary tensor without a graph; all such tensors share the same
        memory.
        """
        self.source.changed = True
        return self.source.read().detach().requires_grad_(self.requires_grad)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array, under the conditions of `Tensor.numpy`."""
        return self._leaf().numpy(force=force)

    def tolist(self) -> Any:
        """Return the values."""
        return self._leaf().tolist()

    def data_ptr(self) -> int:
        """Return the address of the values."""
        return self._leaf().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory of the values."""
        return self._leaf().untyped_storage()

    def share_memory_(self) -> Tensor:
        """Move the values to shared memory, and return them."""
        shared: Tensor = self.source.read().share_memory_()
        return shared

    def __dlpack__(self, **options: Any) -> Any:
        """Hand the values to another library."""
        return self._leaf().__dlpack__(**options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and save the values, as an ordinary tensor."""
        return self._leaf().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        """Copy the values; a tensor with a history raises, as an ordinary one does."""
        return Tensor.__deepcopy__(self._leaf() if self.is_leaf else self, memo)

    @property
    def data(self) -> Tensor:
        """The tensor without a graph, as `Tensor.data`."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        values = values.detach().view(self.shape)
        self.source = Origin(
            tuple(values.shape), values.dtype, values.device, lambda: values, values, changed=True
        )


def _is_alias(func: Any, args: Any) -> bool:
    """Whether an operation on a lazy tensor returns the same shape, dtype and values."""
    return (
        func in _ALIASES
        or func is _VIEW
        and isinstance(args[0], LazyTensor)
        and args[0].shape == torch.Size(args[1])
    )


def _copies_unread(func: Any, args: Any) -> bool:
    """Whether an operation clones or casts a lazy tensor that nothing has read, with its graph.

    With parameters that may be unused, DDP clones all outputs, with their graph. A clone without a
    graph is made to keep the values, and so reads them.
    """
    if func is not CAST and (func is not _CLONE or not args[0].requires_grad):
        return False
    return args[0].source.values is None


def _read(lazy: LazyTensor) -> Tensor:
    return lazy.source.read()


def lazy_repad(row: Tensor, packed: PackedSequence) -> Tensor:
    """Return `repad(row, packed)`, computed when an operation first reads the batch, and kept from
    then on.

    Args:
        row: [1, T, ...], which may be lazy itself.
        packed: the record of the row.

    Returns:
        [B, S, ...], with the shape, dtype, device and gradient of the padded tensor; detaching,
        casting and cloning do not read it. `row` itself where it has this shape already.
    """
    if packed.indices is None and packed.batch_shape[0] == 1:
        return row
    padded: Tensor = _LazyRepad.apply(row, packed)
    return padded


@dataclass(frozen=True, eq=False)
class Padded:
    """Computes a padded batch [B, S, ...] from its row.

    Attributes:
        row: [1, T, ...], without a graph.
        packed: the record of the row.
    """

    row: Tensor
    packed: PackedSequence

    def __call__(self) -> Tensor:
        """Return the padded batch."""
        return repad(self.row, self.packed)


class _LazyRepad(Function):
    @staticmethod
    def forward(ctx: Any, row: Tensor, packed: PackedSequence) -> Tensor:
        ctx.packed, held = packed, row.detach()
        shape = (*packed.batch_shape, *row.shape[2:])
        kind = type(held) if isinstance(held, LazyTensor) else LazyTensor
        return kind(Origin(shape, row.dtype, row.device, Padded(held, packed)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return unpad(grads[0], ctx.packed), None
