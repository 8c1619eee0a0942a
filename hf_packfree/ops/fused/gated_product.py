"""silu(gate) * up of an MLP, of which nothing is kept but gate and up.

silu(gate) is computed again in the backward pass, bit for bit: on a CPU that takes about as long as
the memory pages that keeping it would take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import silu

from hf_packfree.packing.compiling import is_transformed

_SILU_BACKWARD = torch.ops.aten.silu_backward.grad_input
_is_batched = torch._C._functorch.is_legacy_batchedtensor
"""Whether a gradient is many: `is_grads_batched`, and jacobians with `vectorize`."""


def gated_product(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, with the bits of torch's two operations, those of gradients too.

    Args:
        gate, up: [..., F], in one floating dtype.

    Returns:
        [..., F] in that dtype.
    """
    found: Tensor = _GatedProduct.apply(gate, up)
    return found


class _GatedProduct(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():
            # create_graph=True: in the order in which autograd differentiates silu
            s = gate.sigmoid()
            return d * up * s * (1 + gate * (1 - s)), d * silu(gate)
        if is_transformed() or _is_batched(d):
            # vmap cannot write into what it does not batch
            return torch.ops.aten.silu_backward(d * up, gate), d * silu(gate)
        d_gate = d_up = None
        if ctx.needs_input_grad[0]:
            d_gate = d * up
            _SILU_BACKWARD(d_gate, gate, grad_input=d_gate)
        if ctx.needs_input_grad[1]:
            d_up = silu(gate).mul_(d)
        return d_gate, d_up


__all__ = ["gated_product"]
