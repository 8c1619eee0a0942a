"""The MLP of a decoder layer: PyTorch's matrix products around a fused gated product.

The gated product is not kept: the backward kernel, which reads gate and up anyway, recomputes it,
which adds a sixth memory pass over [T, F]. Launch sizes of the kernels are fixed, so that new row
lengths tune nothing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import silu

from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.ops.backend import block_width, uses_triton
from hf_packfree.ops.fused.add_norm import NormOf, norm_of, want_spare_columns
from hf_packfree.ops.fused.joined_linear import (
    JoinedBackward,
    JoinedLinear,
    JoinedSpec,
    flatten_inputs,
)
from hf_packfree.ops.fused.linear import as_leading, autocast_as_in_forward, rows_of
from hf_packfree.ops.fused.lora import Layer, cast_input, layer_reference
from hf_packfree.ops.fused.projections import input_again, kept_input
from hf_packfree.ops.launch import launch

# columns of a program, at most
_BLOCK = 2048


def swiglu_mlp(
    x: Tensor,
    gate: Layer,
    up: Layer,
    down: Layer,
    *,
    residual: Tensor | None = None,
    backend: str = "torch",
) -> Tensor:
    """Return (silu(x gate^T) * (x up^T)) down^T (Shazeer, arXiv:2002.05202), each factor rounded as
    upstream's MLP does.

    Args:
        x: [..., D], any floating dtype; rounded to the layers'.
        gate, up: weights [F, D], in one dtype, or weights with adapters, see
            `hf_packfree.ops.fused.lora`.
        down: [D, F], likewise.
        residual: [..., D], added to the result after that is rounded, as upstream does; or None.
        backend: "triton", "triton, batch-invariant", where a token gets the same result in a row of
            any length, see `hf_packfree.ops.fused.linear` (without adapters), or "torch".

    Returns:
        [..., D] in the layers' dtype, or with `residual` in the dtype of the sum.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    x = cast_input(x, gate)
    if uses_triton("swiglu", backend):
        inputs, first = flatten_inputs((gate, up), backend)
        output, last = flatten_inputs((down,), backend)
        out = _SwiGLU.apply(x, residual, norm_of(x), (inputs, output), *first, *last)
        return want_spare_columns(out, output.spare_columns(out))
    out = layer_reference(silu(layer_reference(x, gate)) * layer_reference(x, up), down)
    return out if residual is None else residual + out


class _SwiGLU(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        norm: NormOf | None,
        specs: tuple[JoinedSpec, JoinedSpec],
        *tensors: Tensor,
    ) -> Tensor:
        from hf_packfree.ops.fused.kernels.swiglu import swiglu

        count = specs[0].num_tensors
        inputs = JoinedLinear(specs[0], tensors[:count])
        output = JoinedLinear(specs[1], tensors[count:])
        a, b = inputs.forward(x, norm.padded if norm else None)
        gated, padded = output.empty_input(a)
        _run(swiglu, a, b, gated, gated.stride(-2))
        (y,) = output.forward(gated, padded)
        source = kept_input(x, norm, ctx.needs_input_grad[4 : 4 + count])
        ctx.save_for_backward(*source, a, b, *tensors, *inputs.h, *output.h)
        ctx.specs, ctx.num_h, ctx.formula = specs, len(inputs.h), norm.formula if norm else None
        ctx.dtype = residual.dtype if residual is not None else None
        if residual is None:
            return y
        return y.add_(residual) if ctx.dtype == y.dtype else residual + y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        from hf_packfree.ops.fused.kernels.swiglu import swiglu_backward

        (source, weight, a, b, *saved), specs = ctx.saved_tensors, ctx.specs
        first, count = specs[0].num_tensors, specs[0].num_tensors + specs[1].num_tensors
        tensors, h = saved[:count], saved[count:]
        inputs = JoinedLinear(specs[0], tensors[:first], h[: ctx.num_h])
        output = JoinedLinear(specs[1], tensors[first:], h[ctx.num_h :])
        needs_d_x, _, _, _, *needed = ctx.needs_input_grad
        with autocast_as_in_forward(d_y):
            last = JoinedBackward(output, [d_y.to(a.dtype)], needed[first:])
            gated = last.d_x().view_as(a)
            d_inputs = a.new_empty(*a.shape[:-1], 2 * a.shape[-1])
            # overwrites the gradient of the gated product with the product
            _run(swiglu_backward, a, b, gated, d_inputs)
            backward = JoinedBackward(inputs, d_inputs.chunk(2, -1), needed[:first], d_inputs)
            d_x = as_leading(backward.d_x(), a) if needs_d_x else None
            d_tensors = backward.d_tensors(input_again(source, weight, ctx.formula, a.dtype))
            d_residual = None if ctx.dtype is None else d_y.to(ctx.dtype)
            return (
                d_x,
                d_residual,
                None,
                None,
                *d_tensors,
                *last.d_tensors(rows_of(gated)),
            )


def _run(kernel: Any, a: Tensor, *others: Any) -> None:
    width = a.shape[-1]
    block = min(block_width(width), _BLOCK)
    grid = (a.numel() // width * -(-width // block),)
    launch(kernel, grid, a, *others, width, BLOCK=block, num_warps=max(block // 256, 1))
