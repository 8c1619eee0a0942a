"""The output gate in plain torch."""

from __future__ import annotations

from torch import Tensor

from hf_packfree.ops.product import product


def output_gate(x: Tensor, z: Tensor, projection: Tensor | None = None) -> Tensor:
    """See `hf_packfree.ops.output_gate.output_gate`."""
    gated = x * z.sigmoid()
    return gated if projection is None else product(gated.flatten(2), projection)
