"""The gated delta rule over packed documents in PyTorch: chunked, exact at boundaries, light on memory.

Nothing but the inputs is saved for the backward pass, which recomputes the forward's intermediates, one block of heads
at a time.  Every product is a batched one over (chunk, head), which on the CPU gives each chunk the same result
whatever else is in the batch: a document's output is batch-invariant.

Shapes: T tokens, H key heads, HV value heads, K and V head sizes.  Formulas: see `chunks.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hf_packfree.ops.delta_rule.torch_chunked.passes import backward_pass, forward_pass
from hf_packfree.packing import PackedSequence, uncompiled

_WIDTH = 16  # what head sizes are multiples of


@uncompiled
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, packed: PackedSequence, qk_l2norm: bool = True
) -> Tensor:
    """See `hf_packfree.ops.delta_rule.gated_delta_rule`."""
    key_size, value_size = q.shape[-1], v.shape[-1]
    q, k, v = _widen(q), _widen(k), _widen(v)
    out: Tensor = _GatedDeltaRule.apply(q, k, v, g, beta, key_size, packed, qk_l2norm)  # type: ignore[no-untyped-call]
    return out if out.shape[-1] == value_size else out[..., :value_size]


def _widen(x: Tensor) -> Tensor:
    """Append zeros up to a head size of whole cache lines: on odd ones, matrix products depend on the address."""
    return x if x.shape[-1] % _WIDTH == 0 else F.pad(x, (0, -x.shape[-1] % _WIDTH))


class _GatedDeltaRule(torch.autograd.Function):
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
        with torch.autocast(q.device.type, enabled=False):  # it would round the products to half precision
            return forward_pass((q[0], k[0], v[0], g[0], beta[0]), size, packed, qk_l2norm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        inputs = tuple(x[0] for x in ctx.saved_tensors)
        with torch.autocast(d_out.device.type, enabled=False):
            return *backward_pass(inputs, d_out[0], ctx.size, ctx.packed, ctx.qk_l2norm), None, None, None
