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
        needs_gate, needs_up = ctx.needs_input_grad
        # not in place: gradients may come in batches (vmap)
        d_gate = torch.ops.aten.silu_backward(d * up, gate) if needs_gate else None
        return d_gate, d * silu(gate) if needs_up else None


__all__ = ["gated_product"]
