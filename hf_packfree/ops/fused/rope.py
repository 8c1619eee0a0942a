"""Rotary position embedding, of queries or keys, and of both in the output of one joined projection
of q, k and v.

Upstream rotates in seven passes over memory, in vision towers in fp32, which then split q, k and v;
here this is one pass each way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.ops.backend import block_width, uses_triton
from hf_packfree.ops.launch import launch


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, backend: str = "torch") -> Tensor:
    """Return rotate(x), computed in fp32 at least and rounded once.

    Args:
        x: [1, T, H, D], any floating dtype, any strides.
        cos, sin: [1, T, R] with R at most D, of the angles of R / 2 planes, twice; channel i < R /
            2 rotates with channel i + R / 2 (Su et al., arXiv:2104.09864, in the order of
            GPT-NeoX), channels from R on stay.
        backend: "triton" or "torch".

    Returns:
        [1, T, H, D] in x's dtype, contiguous. Upstream rounds each product and the sum, so half
        precision differs by a rounding, fp32 does not.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    run = _Rope.apply if uses_triton("rotary", backend) else rope_reference
    return run(x, cos, sin)


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rope` in PyTorch."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rotary, rest = x.to(wide).split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = rotary.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1) * sin[:, :, None].to(wide)
    rotated = rotary * cos[:, :, None].to(wide) + turned
    return torch.cat((rotated, rest), dim=-1).to(x.dtype)


class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        return _rotated(d_out, *ctx.saved_tensors, backward=True), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, backward: bool) -> Tensor:
    from hf_packfree.ops.fused.kernels.rope import rope

    x, cos, sin = x if x.stride(3) == 1 else x.contiguous(), cos.contiguous(), sin.contiguous()
    out, angles = x.new_empty(x.shape), cos.shape[-1]
    sizes = angles // 2, x.stride(1), x.stride(2), angles
    launch(rope, (x.shape[1],), x, cos, sin, out, *sizes, BACKWARD=backward, **_blocks(x))
    return out


def qkv_rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, backend: str = "torch"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotate(q), rotate(k) and v, the rotation computed in fp32 at least and rounded once,
    as upstream does.

    Args:
        qkv: [T, 3, H, D], any floating dtype, contiguous in the last dimension.
        cos, sin: [T, D], of the angles of D / 2 planes, twice; channel i < D / 2 rotates with
            channel i + D / 2 (Su et al., arXiv:2104.09864, in the order of GPT-NeoX).
        backend: "triton" or "torch".

    Returns:
        Three of [T, H, D] in qkv's dtype.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    run = _QKVRope.apply if uses_triton("rotary", backend) else qkv_rope_reference
    return run(qkv, cos, sin)


def qkv_rope_reference(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`qkv_rope` in PyTorch."""
    wide = torch.promote_types(qkv.dtype, torch.float32)
    x, v = qkv[:, :2].to(wide), qkv[:, 2]
    first, second = x.chunk(2, dim=-1)
    rotated = x * cos[:, None, None].to(wide) + torch.cat((-second, first), dim=-1) * sin[
        :, None, None
    ].to(wide)
    q, k = rotated.to(qkv.dtype).unbind(1)
    return q, k, v


class _QKVRope(Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        from hf_packfree.ops.fused.kernels.rope import qkv_rope

        qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        q, k, v = (qkv.new_empty(len(qkv), *qkv.shape[2:]) for _ in range(3))
        launch(qkv_rope, (len(qkv),), qkv, cos, sin, q, k, v, **_blocks(qkv))
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> tuple[Tensor | None, ...]:
        from hf_packfree.ops.fused.kernels.rope import qkv_rope_backward

        cos, sin = ctx.saved_tensors
        d_qkv = d_q.new_empty(len(d_q), 3, *d_q.shape[1:])
        parts = (part.contiguous() for part in (d_q, d_k, d_v))
        launch(qkv_rope_backward, (len(d_qkv),), *parts, cos, sin, d_qkv, **_blocks(d_qkv))
        return d_qkv, None, None


def _blocks(qkv: Tensor) -> dict[str, int]:
    heads, size = qkv.shape[2:]
    return {
        "HEADS": heads,
        "SIZE": size,
        "ROWS": block_width(heads),
        "WIDTH": block_width(size),
        "num_warps": 4,
    }
