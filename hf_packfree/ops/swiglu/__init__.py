"""The MLP of a decoder layer: one public function, one file per backend."""

from __future__ import annotations

from torch import Tensor

from hf_packfree.ops.backend import Backend, find, needs_triton
from hf_packfree.ops.swiglu import torch_native, triton_native

BACKENDS = {
    "triton": Backend(triton_native.swiglu_mlp, needs_triton, "triton", bits=True),
    "torch": Backend(torch_native.swiglu_mlp),
}


def swiglu_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, backend: str = "torch") -> Tensor:
    """Return (silu(x gate') * (x up')) down' (Shazeer, arXiv:2002.05202), each factor rounded as upstream's MLP does.

    Args:
        x: [..., D], any floating dtype.
        gate, up: [F, D], in x's dtype.
        down: [D, F], in x's dtype.
        backend: a name in `BACKENDS`.

    Returns:
        [..., D] in x's dtype.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    return find("swiglu", BACKENDS, backend)(x, gate, up, down)  # type: ignore[no-any-return]


__all__ = ["BACKENDS", "swiglu_mlp"]
