"""A padded batch [B, S, ...] that is held as its packed row [1, T, ...] and padded when something first reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function

from hf_packfree.packing.lazy import LazyTensor, Source
from hf_packfree.packing.padding import repad, unpad
from hf_packfree.packing.record import PackedSequence


def lazy_repad(row: Tensor, packed: PackedSequence) -> Tensor:
    """Return `repad(row, packed)`, computed when an operation first reads it and kept from then on.

    Args:
        row: [1, T, ...], which may be lazy itself.
        packed: the record of the row.

    Returns:
        [B, S, ...], with the shape, dtype, device and gradient of the padded tensor; detaching and casting read nothing.
        `row` where that has this shape already.
    """
    if packed.indices is None and packed.batch_shape[0] == 1:
        return row
    lazy: LazyPaddedTensor = _LazyRepad.apply(row, packed)  # type: ignore[no-untyped-call]
    lazy.row, lazy.packed = row, packed
    return lazy


class LazyPaddedTensor(LazyTensor):
    """A tensor of the padded batch's shape without its memory."""

    row: Tensor | None = None
    """What the loss is computed from, [1, T, ...] with its gradient; of the tensor that `lazy_repad` returns alone."""
    packed: PackedSequence

    def _before_the_loss(self) -> Tensor | None:
        """Return the row where it is still what this tensor holds: nothing was changed in place."""
        return self.row if self._version == 0 else None

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Call `hook` with the gradient of all that is computed from this tensor, the model's loss on the row included."""
        row = self._before_the_loss()
        if row is None:
            return super().register_hook(hook)  # type: ignore[no-untyped-call]

        def hook_of_row(grad: Tensor) -> Tensor | None:
            padded = lazy_repad(grad, self.packed)
            found = hook(padded)
            return None if found is None or found is padded and not _was_changed(padded) else unpad(found, self.packed)

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
    def grad(self) -> Tensor | None:
        """What `retain_grad` keeps."""
        row = self._before_the_loss()
        if row is None:
            return super().grad
        return None if row.grad is None else repad(row.grad, self.packed)

    @grad.setter
    def grad(self, values: Tensor | None) -> None:
        row = self._before_the_loss()
        if row is None:
            super(LazyPaddedTensor, type(self)).grad.__set__(self, values)  # type: ignore[union-attr]
        else:
            row.grad = None if values is None else unpad(values, self.packed)


def _was_changed(tensor: Tensor) -> bool:
    return not isinstance(tensor, LazyTensor) or tensor.source.changed


class _LazyRepad(Function):
    @staticmethod
    def forward(ctx: Any, row: Tensor, packed: PackedSequence) -> Tensor:
        ctx.packed, held = packed, row.detach()
        shape = (*packed.batch_shape, *row.shape[2:])
        return LazyPaddedTensor(Source(shape, row.dtype, row.device, lambda: repad(held, packed)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return unpad(grads[0], ctx.packed), None
