"""The sigmoid gate on the output of attention: one public function, one file per backend."""

from __future__ import annotations

from torch import Tensor

from hf_packfree.ops.backend import Backend, find, needs_triton
from hf_packfree.ops.output_gate import torch_native, triton_native

BACKENDS = {"triton": Backend(triton_native.output_gate, needs_triton), "torch": Backend(torch_native.output_gate)}


def output_gate(x: Tensor, z: Tensor, *, backend: str = "torch") -> Tensor:
    """Return x * sigmoid(z).

    Args:
        x, z: [1, T, H, D], any floating dtype, any strides.
        backend: a name in `BACKENDS`.

    Returns:
        [1, T, H, D] in x's dtype.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    return find("output gate", BACKENDS, backend)(x, z)  # type: ignore[no-any-return]


__all__ = ["BACKENDS", "output_gate"]
