"""The gated RMS norm on our Triton kernels; launch sizes are fixed, so that new row lengths tune nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_packfree.ops.backend import block_width

_ROWS = {"forward": 16, "backward": 8}  # of a block
_TILES = 16  # blocks of a program in the backward pass


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `hf_packfree.ops.gated_norm.gated_rms_norm`."""
    return _GatedNorm.apply(x, z, weight, eps)  # type: ignore[no-any-return,no-untyped-call]


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        from hf_packfree.ops.gated_norm.triton_kernels import gated_norm

        x, z = x.contiguous(), z.contiguous()
        ctx.save_for_backward(x, z, weight)
        ctx.eps = eps
        out, size = torch.empty_like(x), x.shape[-1]
        rows = x.numel() // size
        with torch.cuda.device_of(x):
            launch = _launch(size, "forward")
            gated_norm[(-(-rows // launch["ROWS"]),)](x, z, weight, out, rows, size, eps, **launch)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        from hf_packfree.ops.gated_norm.triton_kernels import gated_norm_backward

        x, z, weight = ctx.saved_tensors
        d_x, d_z, size = torch.empty_like(x), torch.empty_like(z), x.shape[-1]
        rows = x.numel() // size
        launch = _launch(size, "backward")
        programs = -(-rows // (launch["ROWS"] * _TILES))
        d_weight = weight.new_empty(programs, size, dtype=torch.float32)
        with torch.cuda.device_of(x):
            gated_norm_backward[(programs,)](
                x, z, weight, d_out.contiguous(), d_x, d_z, d_weight, rows, size, ctx.eps, _TILES, **launch
            )
        return d_x, d_z, d_weight.sum(0).to(weight.dtype), None


def _launch(size: int, way: str) -> dict[str, int]:
    return {"ROWS": _ROWS[way], "WIDTH": block_width(size), "num_warps": 4}
