"""RMS norm times a gate, over the channels of one head.

Where only a projection reads the norm, it is not kept for the backward pass: the backward kernel,
which reads x and z anyway, recomputes it. Launch sizes of the kernels are fixed, so that new row
lengths tune nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

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
from hf_packfree.ops.fused.reduce import sum_partials
from hf_packfree.ops.launch import launch

# elements of a block
_ROWS = {"forward": 16, "backward": 8}
# blocks of a program in the backward pass
_BLOCKS = 16


def gated_rms_norm(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float,
    *,
    projection: Layer | None = None,
    backend: str = "torch",
) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight * silu(z), computed in fp32 at least and rounded
    once.

    Args:
        x: [1, T, HV, V], any floating dtype.
        z: of the same elements, [1, T, HV, V] or [1, T, HV*V].
        weight: [V].
        eps: added to the mean square.
        projection: [F, HV*V], the linear layer that alone reads the result, see
            `hf_packfree.ops.fused.lora`, or None.
        backend: "triton", "triton, batch-invariant", where a token gets the same result in a row of
            any length, see `hf_packfree.ops.fused.linear`, or "torch".

    Returns:
        [1, T, HV, V] in x's dtype, or its projection, [1, T, F]. Upstream's module rounds to x's
        dtype before it multiplies by the weight; so half precision differs by a rounding, fp32 does
        not.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    if uses_triton("gated norm", backend):
        spec, tensors = flatten_inputs(() if projection is None else (projection,), backend)
        out = _GatedNorm.apply(x, z, weight, eps, spec, *tensors)
        return want_spare_columns(out, spec.spare_columns(out))
    normed = gated_rms_norm_reference(x, z.reshape(x.shape), weight, eps)
    return normed if projection is None else layer_reference(normed.flatten(2), projection)


def gated_rms_norm_reference(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`gated_rms_norm` in PyTorch."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scaled = x.to(wide) * torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.to(wide) * F.silu(z.to(wide))).to(x.dtype)


class _GatedNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        z: Tensor,
        weight: Tensor,
        eps: float,
        spec: JoinedSpec,
        *tensors: Tensor,
    ) -> Tensor:
        from hf_packfree.ops.fused.kernels.norms import gated_norm

        x, z, weight = x.contiguous(), z.contiguous(), weight.contiguous()
        sizes, layer, tokens = _sizes(x), JoinedLinear(spec, tensors), x.flatten(-2)
        normed, padded = layer.empty_input(tokens)
        blocks, strides = _blocks(x, "forward"), (x.shape[-2], normed.stride(-2))
        launch(
            gated_norm,
            (-(-sizes[0] // blocks["ROWS"]),),
            x,
            z,
            weight,
            normed,
            *sizes,
            *strides,
            eps,
            **blocks,
        )
        out = layer.forward(normed, padded)[0] if tensors else normed.view(x.shape)
        ctx.save_for_backward(x, z, weight, *tensors, *layer.h)
        ctx.eps, ctx.spec = eps, spec
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        (x, z, weight, *saved), count = ctx.saved_tensors, ctx.spec.num_tensors
        recompute = partial(_gradients, x, z, weight, ctx.eps, ctx.needs_input_grad[2])
        if not count:
            return *recompute(d_out.contiguous(), False)[0], None, None
        layer = JoinedLinear(ctx.spec, saved[:count], saved[count:])
        d_x, d_z, d_weight, *d_tensors = linear_backward(
            d_out, layer, recompute, ctx.needs_input_grad[5:]
        )
        return d_x, d_z, d_weight, None, None, *d_tensors


def _gradients(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float,
    needs_weight: bool,
    d_normed: Tensor,
    recompute: bool,
) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensor | None]:
    """The gradients of x, z and weight, and where `recompute` the norm too."""
    from hf_packfree.ops.fused.kernels.norms import gated_norm_backward

    d_x, d_z, sizes = torch.empty_like(x), torch.empty_like(z), _sizes(x)
    normed = torch.empty_like(x) if recompute else None
    blocks = _blocks(x, "backward")
    programs = -(-sizes[0] // (blocks["ROWS"] * _BLOCKS))
    d_weight = (
        weight.new_empty(programs, x.shape[-1], dtype=torch.float32) if needs_weight else None
    )
    launch(
        gated_norm_backward,
        (programs,),
        x,
        z,
        weight,
        d_normed,
        normed,
        d_x,
        d_z,
        d_weight,
        *sizes,
        eps,
        _BLOCKS,
        RECOMPUTE=recompute,
        **blocks,
    )
    return (
        d_x,
        d_z,
        sum_partials(d_weight, weight.dtype) if d_weight is not None else None,
    ), normed


def _sizes(x: Tensor) -> tuple[int, int]:
    """(heads of all tokens together, channels of a head)."""
    return x.numel() // x.shape[-1], x.shape[-1]


def _blocks(x: Tensor, direction: str) -> dict[str, int]:
    """The `tl.constexpr` arguments of a kernel."""
    return {"ROWS": _ROWS[direction], "WIDTH": block_width(x.shape[-1]), "num_warps": 4}
