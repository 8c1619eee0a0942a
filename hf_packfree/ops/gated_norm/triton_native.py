"""The gated RMS norm on our Triton kernels; launch sizes are fixed, so that new row lengths tune nothing.

Where a projection reads it and nothing else does, what the norm made is not kept: the backward pass makes it again in the
kernel that reads x and z there anyway.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_packfree.ops.backend import block_width
from hf_packfree.ops.launch import launch
from hf_packfree.ops.operation import Operation
from hf_packfree.ops.partial_sums import summed
from hf_packfree.ops.product import product, product_backward

_ROWS = {"forward": 16, "backward": 8}  # of a block
_TILES = 16  # blocks of a program in the backward pass


def gated_rms_norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, projection: Tensor | None = None, rows: Tensor | None = None
) -> Tensor:
    """See `hf_packfree.ops.gated_norm.gated_rms_norm`."""
    return _GatedNorm.apply(x, z, weight, eps, projection, rows)  # type: ignore[no-any-return]


class _GatedNorm(Operation):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, z: Tensor, weight: Tensor, eps: float, projection: Tensor | None, rows: Tensor | None
    ) -> Tensor:
        from hf_packfree.ops.gated_norm.triton_kernels import gated_norm

        x, z = x.contiguous(), z.contiguous()
        ctx.save_for_backward(x, z, weight, projection, rows)
        ctx.eps = eps
        normed, sizes = torch.empty_like(x), _sizes(x)
        blocks = _blocks(x, rows, "forward")
        launch(gated_norm, (-(-sizes[0] // blocks["ROWS"]),), x, z, weight, rows, normed, *sizes, eps, **blocks)
        return normed if projection is None else product(normed.flatten(-2), projection)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, z, weight, projection, rows = ctx.saved_tensors
        remade = partial(_gradients, x, z, weight, ctx.eps, rows)
        if projection is None:
            return *remade(d_out.contiguous(), False)[0], None, None, None
        *gradients, d_projection = product_backward(d_out, projection, remade, ctx.needs_input_grad[4])
        return *gradients, None, d_projection, None


def _gradients(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, rows: Tensor | None, d_normed: Tensor, remakes: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """Those of x, z and weight, and where it `remakes` what the norm made."""
    from hf_packfree.ops.gated_norm.triton_kernels import gated_norm_backward

    d_x, d_z, sizes = torch.empty_like(x), torch.empty_like(z), _sizes(x)
    made = torch.empty_like(x) if remakes else None
    blocks = _blocks(x, rows, "backward")
    programs = -(-sizes[0] // (blocks["ROWS"] * _TILES))
    d_weight = weight.new_empty(programs, x.shape[-1], dtype=torch.float32)
    launch(
        gated_norm_backward, (programs,), x, z, weight, rows, d_normed, made, d_x, d_z, d_weight, *sizes, eps, _TILES,
        REMAKES=remakes, **blocks,
    )
    return (d_x, d_z, summed(d_weight, weight.dtype)), made


def _sizes(x: Tensor) -> tuple[int, int]:
    """Heads of all tokens, and channels of one."""
    return x.numel() // x.shape[-1], x.shape[-1]


def _blocks(x: Tensor, rows: Tensor | None, way: str) -> dict[str, Any]:
    """What a program is compiled for."""
    width, heads = block_width(x.shape[-1]), 1 if rows is None else x.shape[-2]  # 1: nobody asks
    return {"HEADS": heads, "MOVED": rows is not None, "ROWS": _ROWS[way], "WIDTH": width, "num_warps": 4}
