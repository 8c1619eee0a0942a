"""Depthwise causal convolution over packed documents: one public function, one file per backend."""

from __future__ import annotations

from torch import Tensor

from hf_packfree.errors import BackendUnavailable
from hf_packfree.ops.conv import torch_native
from hf_packfree.packing import PackedSequence

BACKENDS = {"torch": torch_native.causal_conv1d}


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    packed: PackedSequence,
    *,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    backend: str = "torch",
) -> Tensor:
    """Convolve every channel causally, without letting a window reach into the document before.

    Args:
        x: [1, T, C], any floating dtype, any strides.
        weight: [C, W], tap W-1 meets the current token; any W of at least 1.
        packed: where the documents lie.
        bias: [C].
        activation: "silu" or its other name "swish", or None.
        backend: a name in `BACKENDS`.

    Returns:
        [1, T, C] in x's dtype.  Each document's values are, bit for bit, those of the document alone.

    Raises:
        ValueError: there is no such activation.
        BackendUnavailable: no backend has that name.
    """
    if activation not in ("silu", "swish", None):
        raise ValueError(f"found activation {activation!r}; wanted 'silu', 'swish' or None; pass one of them")
    if backend not in BACKENDS:
        raise BackendUnavailable(f"found conv backend {backend!r}; wanted one of {sorted(BACKENDS)}; pass one of them")
    return BACKENDS[backend](x, weight, packed, bias, activation is not None)


__all__ = ["BACKENDS", "causal_conv1d"]
