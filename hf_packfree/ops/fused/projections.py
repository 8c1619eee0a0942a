"""Linear layers that read one tensor, such as q, k and v, as one operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.ops.backend import uses_triton
from hf_packfree.ops.fused.add_norm import NormOf, norm_of
from hf_packfree.ops.fused.joined_linear import (
    JoinedBackward,
    JoinedLinear,
    JoinedSpec,
    flatten_inputs,
)
from hf_packfree.ops.fused.linear import as_leading, autocast_as_in_forward, rows_of
from hf_packfree.ops.fused.lora import Layer, cast_input, layer_reference


def projections(x: Tensor, *layers: Layer, backend: str = "torch") -> tuple[Tensor, ...]:
    """Return the output of each linear layer; "triton" sums the gradients of x inside the matrix
    products.

    Args:
        x: [..., D], any floating dtype; rounded to the layers'.
        layers: weights [F, D], all in one dtype, or weights with adapters, see
            `hf_packfree.ops.fused.lora`.
        backend: "triton", "triton, batch-invariant", where a row of x gives the same result among
            any number of rows (without adapters), or "torch".

    Returns:
        [..., F] each, in the layers' dtype.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    x = cast_input(x, layers[0])
    if uses_triton("projections", backend):
        spec, tensors = flatten_inputs(layers, backend)
        return _Projections.apply(spec, norm_of(x), x, *tensors)  # type: ignore[no-any-return]
    return tuple(layer_reference(x, layer) for layer in layers)


class _Projections(Function):
    @staticmethod
    def forward(
        ctx: Any,
        spec: JoinedSpec,
        norm: NormOf | None,
        x: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        layers = JoinedLinear(spec, tensors)
        outs = layers.forward(x, norm.padded if norm else None)
        kept = kept_input(x, norm, ctx.needs_input_grad[3:])
        ctx.save_for_backward(*kept, *tensors, *layers.h)
        ctx.spec, ctx.formula, ctx.dtype = spec, norm.formula if norm else None, x.dtype
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outs: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, *saved), spec = ctx.saved_tensors, ctx.spec
        needs_x, *needed = ctx.needs_input_grad[2:]
        with autocast_as_in_forward(d_outs[0]):
            layers = JoinedLinear(spec, saved[: spec.num_tensors], saved[spec.num_tensors :])
            backward = JoinedBackward(layers, d_outs, needed)
            d_x = as_leading(backward.d_x(), d_outs[0]) if needs_x else None
            x = input_again(x, weight, ctx.formula, ctx.dtype)
            return None, None, d_x, *backward.d_tensors(x)


def kept_input(
    x: Tensor, norm: NormOf | None, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the tensors to save for the backward pass: (x, None); (total, norm weight) if x is a
    norm, which is then recomputed; (None, None) where no gradient needs x.

    Args:
        needed: whether the gradient of each weight and adapter is needed.
    """
    if not any(needed):
        return None, None
    return (x, None) if norm is None else (norm.total, norm.weight)


def input_again(
    kept: Tensor | None,
    weight: Tensor | None,
    formula: tuple[float, float] | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """Return x [T, D] in `dtype` from the tensors that `kept_input` returned and the norm's
    `formula`; None where they are None.
    """
    if kept is None:
        return None
    x = kept if weight is None or formula is None else NormOf(kept, weight, *formula).again(dtype)
    return rows_of(x)
