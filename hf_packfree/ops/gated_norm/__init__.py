"""RMS norm times a gate, over the channels of one head: one public function, one file per backend."""

from __future__ import annotations

from torch import Tensor

from hf_packfree.ops.backend import Backend, find, needs_triton
from hf_packfree.ops.gated_norm import fla, torch_native, triton_native
from hf_packfree.ops.order import moved_back
from hf_packfree.ops.product import product

BACKENDS = {
    "triton": Backend(triton_native.gated_rms_norm, needs_triton, "triton", bits=True),
    "fla": Backend(fla.gated_rms_norm, fla.unusable, "fla-core"),
    "torch": Backend(torch_native.gated_rms_norm),
}
"""FLA tunes its norm by a row's length, and "torch" is upstream's module in a layer: bits are ours alone to promise."""
REMAKES = ("triton",)
"""The backends that take `projection` and `rows` themselves; they make the result again for the projection's weights."""


def gated_rms_norm(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float,
    *,
    projection: Tensor | None = None,
    rows: Tensor | None = None,
    backend: str = "torch",
) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight * silu(z), computed in fp32 at least and rounded once.

    Args:
        x, z: [1, T, HV, V], any floating dtype.
        weight: [V].
        eps: added to the mean square.
        projection: [F, HV*V], the weight of the linear layer that alone reads the result, or None.
        rows: int32 [T], the row of x that holds each token of z and of the result, see `hf_packfree.ops.order`; None: its own.
        backend: a name in `BACKENDS`.

    Returns:
        [1, T, HV, V] in x's dtype, or what the projection makes of it, [1, T, F].  Upstream's module rounds to x's dtype
        before it multiplies by the weight; in half precision the last bits differ, in fp32 they do not.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    run = find("gated norm", BACKENDS, backend)
    if backend in REMAKES:
        return run(x, z, weight, eps, projection, rows)  # type: ignore[no-any-return]
    normed: Tensor = run(moved_back(x, rows), z, weight, eps)
    return normed if projection is None else product(normed.flatten(2), projection)


__all__ = ["BACKENDS", "REMAKES", "gated_rms_norm"]
