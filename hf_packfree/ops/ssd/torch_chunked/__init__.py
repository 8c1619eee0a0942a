"""Mamba-2's SSD over packed documents in PyTorch: chunked, exact at boundaries, light on memory.

Nothing but the inputs is saved for the backward pass, which recomputes the forward's intermediates,
one block of heads at a time. Every product is a batched one over chunks, which on the CPU gives
each chunk the same result whatever else is in the batch: a document's output is batch-invariant.

Formulas: see `chunks.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.ops.chunked.layout import widen
from hf_packfree.ops.ssd.torch_chunked.passes import backward_pass, forward_pass
from hf_packfree.packing import PackedSequence, uncompiled


@uncompiled
def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, packed: PackedSequence
) -> Tensor:
    """See `hf_packfree.ops.ssd.ssd`."""
    size = x.shape[-1]
    out: Tensor = _SSD.apply(widen(x), dt, A, widen(B), widen(C), D, packed)
    return out if out.shape[-1] == size else out[..., :size]


class _SSD(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        packed: PackedSequence,
    ) -> Tensor:
        ctx.save_for_backward(x, dt, A, B, C, D)
        ctx.packed = packed
        # autocast would round the products to half precision
        with torch.autocast(x.device.type, enabled=False):
            return forward_pass(x[0], dt[0], A, B[0], C[0], D, packed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, A, B, C, D = ctx.saved_tensors
        with torch.autocast(d_out.device.type, enabled=False):
            found = backward_pass(x[0], dt[0], A, B[0], C[0], D, ctx.packed, d_out[0])
        return *found, None
