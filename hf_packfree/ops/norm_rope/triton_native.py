"""RMS norm and rotary embedding on our Triton kernels; launch sizes are fixed, so that new row lengths tune nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_packfree.ops.backend import block_width
from hf_packfree.ops.launch import launch
from hf_packfree.ops.operation import Operation
from hf_packfree.ops.partial_sums import summed

_TILES, _PROGRAMS = 4, 4096  # in the backward pass: tokens of a program at most, programs at least


def norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """See `hf_packfree.ops.norm_rope.norm_rope`."""
    return _NormRope.apply(x, weight, cos, sin, eps)  # type: ignore[no-any-return]


class _NormRope(Operation):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        from hf_packfree.ops.norm_rope.triton_kernels import norm_rope

        x = x if x.stride(3) == 1 else x.contiguous()
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps = eps
        out = x.new_empty(x.shape)
        launch(norm_rope, (x.shape[1],), x, weight, cos, sin, out, *_sizes(x, cos), eps, **_blocks(x))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        from hf_packfree.ops.norm_rope.triton_kernels import norm_rope_backward

        x, weight, cos, sin = ctx.saved_tensors
        d_x, tokens = x.new_empty(x.shape), x.shape[1]
        tiles = max(1, min(_TILES, tokens // _PROGRAMS))
        d_weight = weight.new_empty(-(-tokens // tiles), x.shape[3], dtype=torch.float32)
        launch(
            norm_rope_backward, (len(d_weight),), x, weight, cos, sin, d_out.contiguous(), d_x, d_weight, tokens,
            *_sizes(x, cos), ctx.eps, tiles, **_blocks(x),
        )
        return d_x, summed(d_weight, weight.dtype), None, None, None


def _sizes(x: Tensor, cos: Tensor) -> tuple[int, ...]:
    """Sizes and strides that the kernels take."""
    return x.shape[3], cos.shape[-1] // 2, x.stride(1), x.stride(2), cos.shape[-1]


def _blocks(x: Tensor) -> dict[str, int]:
    return {"HEADS": x.shape[2], "WIDTH": block_width(x.shape[3]), "num_warps": 1}
