"""Linear layers of one tensor: one public function, one file per backend."""

from __future__ import annotations

from torch import Tensor

from hf_packfree.ops.backend import Backend, find, needs_triton
from hf_packfree.ops.projections import torch_native, triton_native

BACKENDS = {
    "triton": Backend(triton_native.projections, needs_triton, "triton", bits=True),
    "torch": Backend(torch_native.projections),
}


def projections(x: Tensor, *weights: Tensor, backend: str = "torch") -> tuple[Tensor, ...]:
    """Return x weight' of each weight.

    Args:
        x: [..., D], any floating dtype.
        weights: [F, D] each, in x's dtype.
        backend: a name in `BACKENDS`.

    Returns:
        [..., F] each, in x's dtype.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    return find("projections", BACKENDS, backend)(x, *weights)  # type: ignore[no-any-return]


__all__ = ["BACKENDS", "projections"]
