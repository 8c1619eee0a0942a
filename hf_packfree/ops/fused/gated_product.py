"""silu(gate) * up of an MLP; only gate and up are kept for the backward pass.

silu(gate) is recomputed in the backward pass, bit for bit: on a CPU that takes about as long as the
page faults of keeping it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import silu


def gated_product(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up; values and gradients have the bits of torch's two operations.

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
            # create_graph=True: silu's derivative in the order of autograd's own formula
            s = gate.sigmoid()
            return d * up * s * (1 + gate * (1 - s)), d * silu(gate)
        needs_gate, needs_up = ctx.needs_input_grad
        # not in place: gradients may come in batches (vmap)
        d_gate = torch.ops.aten.silu_backward(d * up, gate) if needs_gate else None
        return d_gate, d * silu(gate) if needs_up else None
