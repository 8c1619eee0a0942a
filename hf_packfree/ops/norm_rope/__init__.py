"""RMS norm of each head and rotary position embedding: one public function, one file per backend."""

from __future__ import annotations

from torch import Tensor

from hf_packfree.ops.backend import Backend, find, needs_triton
from hf_packfree.ops.norm_rope import torch_native, triton_native

BACKENDS = {
    "triton": Backend(triton_native.norm_rope, needs_triton, "triton", bits=True),
    "torch": Backend(torch_native.norm_rope),
}


def norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, *, backend: str = "torch") -> Tensor:
    """Return rotate(x / sqrt(mean(x^2) + eps) * (1 + weight)), computed in fp32 at least and rounded once.

    Args:
        x: [1, T, H, D], any floating dtype, any strides.
        weight: [D], added to one as Qwen3-Next and Qwen3.5 do.
        cos, sin: [1, T, R] with R at most D, of the angles of R / 2 planes, twice; channel i < R / 2 turns with channel
            i + R / 2 (Su et al., arXiv:2104.09864, in the order of GPT-NeoX), channels from R on stay.
        eps: added to the mean square.
        backend: a name in `BACKENDS`.

    Returns:
        [1, T, H, D] in x's dtype, contiguous.  Upstream rounds between norm and rotation, and within the rotation; in
        half precision the last bits differ, in fp32 they do not.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    return find("norm and rotary", BACKENDS, backend)(x, weight, cos, sin, eps)  # type: ignore[no-any-return]


__all__ = ["BACKENDS", "norm_rope"]
