"""Linear layers that read one tensor as one op, which sums the gradients of the tensor inside the matrix products."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_packfree.ops.backend import uses_triton
from hf_packfree.ops.fused.layers import Layers
from hf_packfree.ops.fused.linear import autocast_as_in_forward
from hf_packfree.ops.fused.low_rank import Layer, Layout, layer_reference, take_apart
from hf_packfree.ops.operation import Operation


def projections(x: Tensor, *layers: Layer, batch_invariant: bool = False, backend: str = "torch") -> tuple[Tensor, ...]:
    """Return the output of each linear layer; "triton" sums the gradients of x inside the matrix products.

    Args:
        x: [..., D], any floating dtype.
        layers: [F, D] each, in x's dtype, or that with adapters, see `hf_packfree.ops.fused.low_rank`.
        batch_invariant: with "triton", a row of x gives the same result among any number of rows, without adapters.
        backend: "triton" or "torch".

    Returns:
        [..., F] each, in x's dtype.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    if uses_triton("projections", backend):
        layout, tensors = take_apart(layers)
        return _Projections.apply(layout, batch_invariant, x, *tensors)  # type: ignore[no-any-return]
    return tuple(layer_reference(x, layer) for layer in layers)


class _Projections(Operation):
    @staticmethod
    def forward(ctx: Any, layout: Layout, batch_invariant: bool, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        layers = Layers(layout, tensors)
        outs = layers.forward(x, batch_invariant)
        ctx.save_for_backward(x, *tensors, *layers.inner)
        ctx.layout = layout
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outs: Tensor) -> tuple[Tensor | None, ...]:
        (x, *saved), layout = ctx.saved_tensors, ctx.layout
        needs_x, *needed = ctx.needs_input_grad[2:]
        with autocast_as_in_forward(x):
            backward = Layers(layout, saved[: layout.tensors], saved[layout.tensors :]).backward(d_outs)
            d_x = backward.of_input().view_as(x) if needs_x else None
            return None, None, d_x, *backward.of_tensors(x.flatten(0, -2), needed)


__all__ = ["projections"]
