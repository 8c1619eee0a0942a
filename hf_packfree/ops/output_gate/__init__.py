"""The sigmoid gate on the output of attention: one public function, one file per backend."""

from __future__ import annotations

from torch import Tensor

from hf_packfree.ops.backend import Backend, find, needs_triton
from hf_packfree.ops.output_gate import torch_native, triton_native
from hf_packfree.ops.product import product

BACKENDS = {
    "triton": Backend(triton_native.output_gate, needs_triton, "triton", bits=True),
    "torch": Backend(torch_native.output_gate),
}
REMAKES = ("triton",)
"""The backends that take `projection` themselves; they make the result again for its weights instead of keeping it."""


def output_gate(x: Tensor, z: Tensor, *, projection: Tensor | None = None, backend: str = "torch") -> Tensor:
    """Return x * sigmoid(z).

    Args:
        x, z: [1, T, H, D], any floating dtype, any strides.
        projection: [F, H*D], the weight of the linear layer that alone reads the result, or None.
        backend: a name in `BACKENDS`.

    Returns:
        [1, T, H, D] in x's dtype, or what the projection makes of it, [1, T, F].

    Raises:
        BackendUnavailable: no backend has that name.
    """
    run = find("output gate", BACKENDS, backend)
    if backend in REMAKES:
        return run(x, z, projection)  # type: ignore[no-any-return]
    gated: Tensor = run(x, z)
    return gated if projection is None else product(gated.flatten(2), projection)


__all__ = ["BACKENDS", "REMAKES", "output_gate"]
