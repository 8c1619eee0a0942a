"""The sigmoid gate on the output of attention.

Only x and z are kept for the backward pass: where a projection reads the product, the backward
kernel, which reads x and z anyway, recomputes it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.ops.backend import block_width, uses_triton
from hf_packfree.ops.fused.add_norm import want_spare_columns
from hf_packfree.ops.fused.joined_linear import (
    JoinedLinear,
    JoinedSpec,
    flatten_inputs,
    linear_backward,
)
from hf_packfree.ops.fused.lora import Layer, layer_reference
from hf_packfree.ops.launch import launch

# elements of a program
_BLOCK = 4096


def output_gate(
    x: Tensor,
    z: Tensor,
    *,
    projection: Layer | None = None,
    backend: str = "torch",
) -> Tensor:
    """Return x * sigmoid(z).

    Args:
        x, z: [1, T, H, D], any floating dtype, any strides.
        projection: [F, H*D], the linear layer that alone reads the result, see
            `hf_packfree.ops.fused.lora`, or None.
        backend: "triton", "triton, batch-invariant", where a token gets the same result in a row of
            any length, see `hf_packfree.ops.fused.linear`, or "torch".

    Returns:
        [1, T, H, D] in x's dtype, or its projection, [1, T, F].

    Raises:
        BackendUnavailable: no backend has that name.
    """
    if uses_triton("output gate", backend):
        spec, tensors = flatten_inputs(() if projection is None else (projection,), backend)
        out = _OutputGate.apply(x, z, spec, *tensors)
        return want_spare_columns(out, spec.spare_columns(out))
    gated = x * z.sigmoid()
    return gated if projection is None else layer_reference(gated.flatten(2), projection)


class _OutputGate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, spec: JoinedSpec, *tensors: Tensor) -> Tensor:
        from hf_packfree.ops.fused.kernels.gates import output_gate

        x, z = x.contiguous(), z if z.stride(3) == 1 else z.contiguous()
        layer, tokens = JoinedLinear(spec, tensors), x.flatten(2)
        gated, padded = layer.empty_input(tokens)
        grid, sizes, blocks = _blocks(z)
        launch(output_gate, grid, x, z, gated, *sizes, gated.stride(-2), **blocks)
        out = layer.forward(gated, padded)[0] if tensors else gated.view(x.shape)
        ctx.save_for_backward(x, z, *tensors, *layer.h)
        ctx.spec = spec
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        (x, z, *saved), count = ctx.saved_tensors, ctx.spec.num_tensors
        recompute = partial(_gradients, x, z)
        if not count:
            return *recompute(d_out.contiguous(), False)[0], None
        layer = JoinedLinear(ctx.spec, saved[:count], saved[count:])
        d_x, d_z, *d_tensors = linear_backward(d_out, layer, recompute, ctx.needs_input_grad[3:])
        return d_x, d_z, None, *d_tensors


def _gradients(
    x: Tensor, z: Tensor, d_gated: Tensor, recompute: bool
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """The gradients of x and z, and where `recompute` the gated product too."""
    from hf_packfree.ops.fused.kernels.gates import output_gate_backward

    d_x, d_z = torch.empty_like(x), z.new_empty(z.shape)
    gated = torch.empty_like(x) if recompute else None
    grid, sizes, blocks = _blocks(z)
    launch(
        output_gate_backward,
        grid,
        x,
        z,
        d_gated,
        gated,
        d_x,
        d_z,
        *sizes,
        RECOMPUTE=recompute,
        **blocks,
    )
    return (d_x, d_z), gated


def _blocks(z: Tensor) -> tuple[tuple[int], tuple[int, ...], dict[str, int]]:
    _, tokens, heads, size = z.shape
    width = block_width(size)
    rows = max(1, _BLOCK // width)
    sizes = (tokens, heads, size, z.stride(1), z.stride(2))
    return (-(-tokens * heads // rows),), sizes, {"ROWS": rows, "WIDTH": width, "num_warps": 4}
