"""RMS norm of each head and rotary position embedding.

Launch sizes of the kernels are fixed, so that new row lengths tune nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.ops.backend import block_width, uses_triton
from hf_packfree.ops.fused.reduce import sum_partials
from hf_packfree.ops.launch import launch

# most tokens of a program in the backward pass
_TOKENS_PER_PROGRAM = 4
# fewest programs in the backward pass
_PROGRAMS = 4096


def norm_rope(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, *, backend: str = "torch"
) -> Tensor:
    """Return rotate(x / sqrt(mean(x^2) + eps) * (1 + weight)), computed in fp32 at least and
    rounded once.

    Args:
        x: [1, T, H, D], any floating dtype, any strides.
        weight: [D], added to one as Qwen3-Next and Qwen3.5 do.
        cos, sin: [1, T, R] with R at most D, of the angles of R / 2 planes, twice; channel i < R /
            2 rotates with channel i + R / 2 (Su et al., arXiv:2104.09864, in the order of
            GPT-NeoX), channels from R on stay.
        eps: added to the mean square.
        backend: "triton" or "torch".

    Returns:
        [1, T, H, D] in x's dtype, contiguous. Upstream rounds between norm and rotation, and within
        the rotation, so half precision differs by a rounding, fp32 does not.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    run = _NormRope.apply if uses_triton("norm and rotary", backend) else norm_rope_reference
    return run(x, weight, cos, sin, eps)


def norm_rope_reference(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """`norm_rope` in PyTorch."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = (
        x.to(wide)
        * torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + eps)
        * (1 + weight.to(wide))
    )
    rotary, rest = y.split([cos.shape[-1], y.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = rotary.chunk(2, dim=-1)
    rotated = rotary * cos[:, :, None].to(wide) + torch.cat((-second, first), dim=-1) * sin[
        :, :, None
    ].to(wide)
    return torch.cat((rotated, rest), dim=-1).to(x.dtype)


class _NormRope(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float
    ) -> Tensor:
        from hf_packfree.ops.fused.kernels.rope import norm_rope

        x = x if x.stride(3) == 1 else x.contiguous()
        weight, cos, sin = weight.contiguous(), cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps = eps
        out = x.new_empty(x.shape)
        launch(
            norm_rope, (x.shape[1],), x, weight, cos, sin, out, *_sizes(x, cos), eps, **_blocks(x)
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        from hf_packfree.ops.fused.kernels.rope import norm_rope_backward

        x, weight, cos, sin = ctx.saved_tensors
        d_x, tokens = x.new_empty(x.shape), x.shape[1]
        tokens_per_program = max(1, min(_TOKENS_PER_PROGRAM, tokens // _PROGRAMS))
        programs, needs_weight = -(-tokens // tokens_per_program), ctx.needs_input_grad[1]
        d_weight = (
            weight.new_empty(programs, x.shape[3], dtype=torch.float32) if needs_weight else None
        )
        launch(
            norm_rope_backward,
            (programs,),
            x,
            weight,
            cos,
            sin,
            d_out.contiguous(),
            d_x,
            d_weight,
            tokens,
            *_sizes(x, cos),
            ctx.eps,
            tokens_per_program,
            **_blocks(x),
        )
        return (
            d_x,
            None if d_weight is None else sum_partials(d_weight, weight.dtype),
            None,
            None,
            None,
        )


def _sizes(x: Tensor, cos: Tensor) -> tuple[int, ...]:
    """Sizes and strides that the kernels take."""
    return x.shape[3], cos.shape[-1] // 2, x.stride(1), x.stride(2), cos.shape[-1]


def _blocks(x: Tensor) -> dict[str, int]:
    return {"HEADS": x.shape[2], "WIDTH": block_width(x.shape[3]), "num_warps": 1}
