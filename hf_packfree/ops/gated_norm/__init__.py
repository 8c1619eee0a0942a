"""RMS norm times a gate, over the channels of one head: one public function, one file per backend."""

from __future__ import annotations

from torch import Tensor

from hf_packfree.ops.backend import Backend, find, needs_triton
from hf_packfree.ops.gated_norm import fla, torch_native, triton_native

BACKENDS = {
    "triton": Backend(triton_native.gated_rms_norm, needs_triton),
    "fla": Backend(fla.gated_rms_norm, fla.unusable, "fla-core"),
    "torch": Backend(torch_native.gated_rms_norm),
}


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, *, backend: str = "torch") -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight * silu(z), computed in fp32 at least and rounded once.

    Args:
        x, z: [..., D], any floating dtype.
        weight: [D].
        eps: added to the mean square.
        backend: a name in `BACKENDS`.

    Returns:
        [..., D] in x's dtype.  Upstream's module rounds to x's dtype before it multiplies by the weight; in half
        precision the last bits differ, in fp32 they do not.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    return find("gated norm", BACKENDS, backend)(x, z, weight, eps)  # type: ignore[no-any-return]


__all__ = ["BACKENDS", "gated_rms_norm"]
