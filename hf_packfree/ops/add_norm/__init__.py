"""Residual sum and the RMS norm that reads it: one public function, one file per backend."""

from __future__ import annotations

from torch import Tensor

from hf_packfree.ops.add_norm import torch_native, triton_native
from hf_packfree.ops.backend import Backend, find, needs_triton

BACKENDS = {
    "triton": Backend(triton_native.add_norm, needs_triton, "triton", bits=True),
    "torch": Backend(torch_native.add_norm),
}


def add_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, *, backend: str = "torch"
) -> tuple[Tensor, Tensor]:
    """Return total = x + branch, and total / sqrt(mean(total^2) + eps) * (1 + weight), computed in fp32 at least.

    Args:
        x: [..., D], the residual stream, any floating dtype.
        branch: [..., D], what is added to it; None: the total is x, and the gradients that reach norm and residual
            stream are summed all the same.
        weight: [D], added to one as Qwen3-Next and Qwen3.5 do.
        eps: added to the mean square.
        backend: a name in `BACKENDS`.

    Returns:
        normed: [..., D] in the total's dtype, from the rounded total, itself rounded once, as upstream's.
        total: [..., D], rounded as torch's sum is.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    return find("residual and norm", BACKENDS, backend)(x, branch, weight, eps)  # type: ignore[no-any-return]


__all__ = ["BACKENDS", "add_norm"]
