"""The output gate in plain torch."""

from __future__ import annotations

from torch import Tensor


def output_gate(x: Tensor, z: Tensor) -> Tensor:
    """See `hf_packfree.ops.output_gate.output_gate`."""
    return x * z.sigmoid()
