"""RMS norm and rotary embedding on our Triton kernels; launch sizes are fixed, so that new row lengths tune nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_packfree.ops.backend import block_width
from hf_packfree.ops.partial_sums import summed

_ELEMENTS, _TILES = 4096, 16  # of a block; blocks of a program in the backward pass


def norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """See `hf_packfree.ops.norm_rope.norm_rope`."""
    return _NormRope.apply(x, weight, cos, sin, eps)  # type: ignore[no-any-return,no-untyped-call]


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        from hf_packfree.ops.norm_rope.triton_kernels import norm_rope

        x = x if x.stride(3) == 1 else x.contiguous()
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps = eps
        out = x.new_empty(x.shape)
        rows, sizes, launch = _launch(x, cos)
        with torch.cuda.device_of(x):
            norm_rope[(-(-rows // launch["ROWS"]),)](x, weight, cos, sin, out, *sizes, eps, **launch)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        from hf_packfree.ops.norm_rope.triton_kernels import norm_rope_backward

        x, weight, cos, sin = ctx.saved_tensors
        d_x = x.new_empty(x.shape)
        rows, sizes, launch = _launch(x, cos)
        programs = -(-rows // (launch["ROWS"] * _TILES))
        d_weight = weight.new_empty(programs, x.shape[3], dtype=torch.float32)
        with torch.cuda.device_of(x):
            norm_rope_backward[(programs,)](
                x, weight, cos, sin, d_out.contiguous(), d_x, d_weight, *sizes, ctx.eps, _TILES, **launch
            )
        return d_x, summed(d_weight, weight.dtype), None, None, None


def _launch(x: Tensor, cos: Tensor) -> tuple[int, tuple[int, ...], dict[str, int]]:
    """Rows, the sizes and strides that the kernels take, and the launch."""
    _, tokens, heads, size = x.shape
    width = block_width(size)
    sizes = (tokens, heads, size, cos.shape[-1] // 2, x.stride(1), x.stride(2), cos.shape[-1])
    return tokens * heads, sizes, {"ROWS": max(1, _ELEMENTS // width), "WIDTH": width, "num_warps": 4}
