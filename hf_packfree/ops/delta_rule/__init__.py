"""The gated delta rule over packed documents: one public function, one file per backend."""

from __future__ import annotations

from torch import Tensor

from hf_packfree.ops.backend import Backend, find
from hf_packfree.ops.delta_rule import fla, flash_qla, torch_chunked
from hf_packfree.ops.delta_rule.reference import recurrent_gated_delta_rule
from hf_packfree.packing import PackedSequence

BACKENDS = {
    "flash_qla": Backend(flash_qla.gated_delta_rule, flash_qla.unusable, "flash-qla", batch_invariant=True),
    "fla": Backend(fla.gated_delta_rule, fla.unusable, "fla-core", batch_invariant=True),
    "torch": Backend(torch_chunked.gated_delta_rule),
    "flash_qla_cut": Backend(flash_qla.gated_delta_rule_cut, flash_qla.unusable, "flash-qla", exact=False),
}


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    packed: PackedSequence,
    *,
    qk_l2norm: bool = True,
    backend: str = "torch",
) -> Tensor:
    """Run the gated delta rule (Yang et al., Gated Delta Networks, arXiv:2412.06464) on each document of a packed row.

    The state starts at zero at every segment start, and queries are scaled by K ** -0.5.  In torch all arithmetic is fp32, or
    fp64 if q is fp64; the kernels multiply in q's dtype (fp32 as TF32) and add in fp32.

    Args:
        q, k: [1, T, H, K], any floating dtype, any strides.
        v: [1, T, HV, V], HV a multiple of H; value head j reads key head j // (HV // H).
        g: [1, T, HV], log decay, at most 0.
        beta: [1, T, HV], write strength.
        packed: where the documents lie.
        qk_l2norm: divide q and k by their L2 norms, x * rsqrt(sum(x^2) + 1e-6); False: they have norm 1 already.
        backend: a name in `BACKENDS`; "flash_qla_cut" trades exactness on documents of some 500 tokens and more for
            speed on rows of few long ones.

    Returns:
        [1, T, HV, V] in v's dtype.  On the CPU each document's values are, bit for bit, those of the document alone;
        on other devices that depends on their matrix library.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    return find("delta rule", BACKENDS, backend)(q, k, v, g, beta, packed, qk_l2norm)  # type: ignore[no-any-return]


__all__ = ["BACKENDS", "gated_delta_rule", "recurrent_gated_delta_rule"]
