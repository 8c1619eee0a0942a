"""The MLP in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear, silu


def swiglu_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """See `hf_packfree.ops.swiglu.swiglu_mlp`."""
    return linear(silu(linear(x, gate)) * linear(x, up), down)
