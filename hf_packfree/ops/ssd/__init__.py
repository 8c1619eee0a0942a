"""Mamba-2's SSD over packed documents: one public function, one file per backend."""

from __future__ import annotations

from torch import Tensor

from hf_packfree.ops.backend import Backend
from hf_packfree.ops.in_graph import is_operator, operator
from hf_packfree.ops.op import Op
from hf_packfree.ops.ssd import fla, mamba_ssm, torch_chunked
from hf_packfree.ops.ssd.reference import recurrent_ssd
from hf_packfree.packing import PackedSequence
from hf_packfree.packing.tree import refuse_tree

OP = Op(
    name="ssd",
    leaks="the recurrent state crosses document boundaries",
    backends={
        "mamba_ssm": Backend(
            mamba_ssm.ssd,
            mamba_ssm.unusable,
            "mamba-ssm",
            compiles="minutes",
            tuned=True,
            bounded=True,
        ),
        # FLA counts its states on the host, which a capture cannot record
        "fla": Backend(fla.ssd, fla.unusable, "fla-core", compiles="minutes", tuned=True),
        "torch": Backend(torch_chunked.ssd),
    },
    slow_in_eager=True,
)


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    packed: PackedSequence,
    *,
    backend: str = "torch",
) -> Tensor:
    """Run Mamba-2's state space duality (Dao & Gu, arXiv:2405.21060) on each document of a packed
    row.

    With S [N, P] a document's state, zero before its first token, every token in turn decays it,
    writes to it and reads it (`recurrent_ssd` is that, token by token):

        S <- exp(dt A) S;    S <- S + B (dt x)^T;    y = S^T C + D x

    In torch all arithmetic is fp32, or fp64 if x is fp64; the kernels multiply in x's dtype (fp32
    as TF32) and add in fp32.

    Args:
        x: [1, T, H, P], any floating dtype, any strides.
        dt: [1, T, H], the time steps, at least 0, with bias, softplus and limits applied.
        A: [H], below 0, the log decay per unit of dt.
        B, C: [1, T, G, N], H a multiple of G; head j writes with B and reads with C of group
            j // (H // G).
        D: [H], the weight of the skip connection from x.
        packed: the documents of the row.
        backend: a name in `OP.backends`.

    Returns:
        [1, T, H, P] in x's dtype. "torch" on the CPU is always batch-invariant, and each document's
        values are, bit for bit, those of the document alone. "mamba_ssm" cuts the row, not its
        documents, into chunks, so its rounding depends on the row.

    Raises:
        BackendUnavailable: no backend has that name, or it cannot take a row of this size.
        UnsupportedInput: the row is a tree of shared prefixes.

    Two documents of two and three tokens, one head:

        >>> import torch
        >>> from hf_packfree import PackedSequence
        >>> from hf_packfree.ops.ssd import ssd
        >>> x, dt = torch.randn(1, 5, 1, 4), torch.rand(1, 5, 1)
        >>> B, C = (torch.randn(1, 5, 1, 8) for _ in range(2))
        >>> A, D = -torch.rand(1), torch.randn(1)
        >>> out = ssd(x, dt, A, B, C, D, PackedSequence.from_lengths([2, 3]))

    Each document gets what it gets in a call of its own:

        >>> def alone(tokens):
        ...     document = x[:, tokens], dt[:, tokens], A, B[:, tokens], C[:, tokens], D
        ...     return ssd(*document, PackedSequence.from_lengths([document[0].shape[1]]))
        >>> torch.equal(out, torch.cat([alone(slice(0, 2)), alone(slice(2, 5))], 1))
        True

    As one document, the last three tokens would read the state of the first two:

        >>> leaking = ssd(x, dt, A, B, C, D, PackedSequence.from_lengths([5]))
        >>> torch.equal(out[:, :2], leaking[:, :2]), torch.allclose(out[:, 2:], leaking[:, 2:])
        (True, False)
    """
    refuse_tree(packed, "for Mamba-2's SSD, whose states nothing hands on to branches")
    if is_operator(packed):
        return _in_graph(packed, x, dt, A, B, C, D, backend)  # type: ignore[no-any-return]
    run = OP.running(backend, packed)
    return run(x, dt, A, B, C, D, packed)  # type: ignore[no-any-return]


_in_graph = operator(
    ssd,
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, str backend",
    lambda x, *others: x.new_empty(x.shape),
)


__all__ = ["OP", "recurrent_ssd", "ssd"]
