"""The two gates of the delta rule, decay and write strength: one public function, one file per backend."""

from __future__ import annotations

from torch import Tensor

from hf_packfree.ops.backend import Backend, find, needs_triton
from hf_packfree.ops.gates import torch_native, triton_native

BACKENDS = {"triton": Backend(triton_native.gates, needs_triton, "triton", bits=True), "torch": Backend(torch_native.gates)}


def gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, rows: Tensor | None = None, backend: str = "torch"
) -> tuple[Tensor, Tensor]:
    """Return the log decay -exp(A_log) * softplus(a + dt_bias) and the write strength sigmoid(b) (arXiv:2412.06464).

    Args:
        a, b: [1, T, HV], any floating dtype, any strides.
        A_log, dt_bias: [HV], any floating dtype.
        rows: int32 [T], the row of g and beta that each token of a and b goes to, see `hf_packfree.ops.order`; None: its own.
        backend: a name in `BACKENDS`.

    Returns:
        g [1, T, HV] in fp32, as upstream has it: in fp16 the exponential overflows; and beta [1, T, HV] in b's dtype.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    return find("gates", BACKENDS, backend)(a, b, A_log, dt_bias, rows)  # type: ignore[no-any-return]


__all__ = ["BACKENDS", "gates"]
