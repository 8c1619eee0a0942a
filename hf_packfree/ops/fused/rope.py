"""Rotary position embedding of queries and keys in the output of one joined projection of q, k and
v.

Vision towers do this before attention. Upstream rotates in fp32 in seven passes over memory, then
splits q, k and v; here both are one pass each way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.ops.backend import block_width, uses_triton
from hf_packfree.ops.launch import launch


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


__all__ = ["qkv_rope", "qkv_rope_reference"]
