"""Kimi Delta Attention over packed documents in PyTorch: chunked, exact at boundaries and for any
decay.

Nothing but the inputs is saved for the backward pass, which recomputes the forward's intermediates,
one block of heads at a time. Every product is a batched one over (chunk, head), which on the CPU
gives each chunk the same result whatever else is in the batch: a document's output is
batch-invariant.

Shapes: T tokens, H heads, K and V head sizes.  Formulas: see `chunks.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.ops.chunked.layout import widen
from hf_packfree.ops.kda.torch_chunked.passes import backward_pass, forward_pass
from hf_packfree.packing import PackedSequence, uncompiled


@uncompiled
def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    packed: PackedSequence,
    qk_l2norm: bool = True,
) -> Tensor:
    """See `hf_packfree.ops.kda.kda`."""
    key_size, value_size = q.shape[-1], v.shape[-1]
    q, k, v, g = widen(q), widen(k), widen(v), widen(g)
    out: Tensor = _KDA.apply(q, k, v, g, beta, key_size, packed, qk_l2norm)
    return out if out.shape[-1] == value_size else out[..., :value_size]


class _KDA(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        size: int,
        packed: PackedSequence,
        qk_l2norm: bool,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, g, beta)
        ctx.size, ctx.packed, ctx.qk_l2norm = size, packed, qk_l2norm
        # autocast would round the products to half precision
        with torch.autocast(q.device.type, enabled=False):
            return forward_pass((q[0], k[0], v[0], g[0], beta[0]), size, packed, qk_l2norm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [x[0] for x in ctx.saved_tensors]
        with torch.autocast(d_out.device.type, enabled=False):
            found = backward_pass(inputs, d_out[0], ctx.size, ctx.packed, ctx.qk_l2norm)
        return *found, None, None, None
