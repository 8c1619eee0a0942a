"""The gated delta rule over packed documents: one public function, one file per backend."""

from __future__ import annotations

from torch import Tensor

from hf_packfree.errors import BackendUnavailable
from hf_packfree.ops.delta_rule import torch_native
from hf_packfree.ops.delta_rule.recurrent import recurrent_gated_delta_rule
from hf_packfree.packing import PackedSequence

BACKENDS = {"torch": torch_native.gated_delta_rule}


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, packed: PackedSequence, *, backend: str = "torch"
) -> Tensor:
    """Run the gated delta rule (Yang et al., Gated Delta Networks, arXiv:2412.06464) on each document of a packed row.

    The state starts at zero at every segment start.  Queries and keys are L2-normalised inside (x * rsqrt(sum(x^2) +
    1e-6)) and queries scaled by K ** -0.5.  All arithmetic is fp32, or fp64 if q is fp64.

    Args:
        q, k: [1, T, H, K], any floating dtype, any strides.
        v: [1, T, HV, V], HV a multiple of H; value head j reads key head j // (HV // H).
        g: [1, T, HV], log decay, at most 0.
        beta: [1, T, HV], write strength.
        packed: where the documents lie.
        backend: a name in `BACKENDS`.

    Returns:
        [1, T, HV, V] in v's dtype.  On the CPU each document's values are, bit for bit, those of the document alone;
        on other devices that depends on their matrix library.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    if backend not in BACKENDS:
        raise BackendUnavailable(
            f"found delta rule backend {backend!r}; wanted one of {sorted(BACKENDS)}; pass one of them"
        )
    return BACKENDS[backend](q, k, v, g, beta, packed)


__all__ = ["BACKENDS", "gated_delta_rule", "recurrent_gated_delta_rule"]
