"""Kimi Delta Attention over packed documents: one public function, one file per backend."""

from __future__ import annotations

from torch import Tensor

from hf_packfree.ops.backend import Backend
from hf_packfree.ops.in_graph import is_operator, operator
from hf_packfree.ops.kda import fla, torch_chunked
from hf_packfree.ops.kda.reference import recurrent_kda
from hf_packfree.ops.op import Op
from hf_packfree.packing import PackedSequence
from hf_packfree.packing.tree import refuse_tree

OP = Op(
    name="kda",
    leaks="the recurrent state crosses document boundaries",
    backends={
        "fla": Backend(
            fla.kda, fla.unusable, "fla-core", compiles="minutes", tuned=True, bounded=True
        ),
        "torch": Backend(torch_chunked.kda),
    },
    slow_in_eager=True,
)


def kda(
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
    """Run Kimi Delta Attention (Kimi Linear, arXiv:2510.26692) on each document of a packed row.

    KDA is the gated delta rule with a decay for every channel of a key.

    With S [K, V] a document's state, zero before its first token, every token in turn decays it,
    writes to it and reads it (`recurrent_kda` is that, token by token):

        S <- diag(exp(g)) S;    S <- S + k (beta (v - k^T S));    o = (q K^-1/2)^T S

    In torch all arithmetic is fp32, or fp64 if q is fp64, and exact for any decay; the kernels
    multiply in q's dtype (fp32 as TF32) and add in fp32.

    Args:
        q, k: [1, T, H, K], any floating dtype, any strides.
        v: [1, T, H, V].
        g: [1, T, H, K], log decay, at most 0.
        beta: [1, T, H], write strength, between 0 and 1.
        packed: the documents of the row.
        qk_l2norm: divide q and k by their L2 norms, x * rsqrt(sum(x^2) + 1e-6); False: they have
            norm 1 already.
        backend: a name in `OP.backends`.

    Returns:
        [1, T, H, V] in v's dtype. On the CPU each document's values are, bit for bit, those of the
        document alone.

    Raises:
        BackendUnavailable: no backend has that name.
        UnsupportedInput: the row is a tree of shared prefixes.

    Two documents of two and three tokens, one head:

        >>> import torch
        >>> from hf_packfree import PackedSequence
        >>> from hf_packfree.ops.kda import kda
        >>> q, k, v = (torch.randn(1, 5, 1, 4) for _ in range(3))
        >>> g, beta = -torch.rand(1, 5, 1, 4), torch.rand(1, 5, 1)
        >>> out = kda(q, k, v, g, beta, PackedSequence.from_lengths([2, 3]))

    Each document gets what it gets in a call of its own:

        >>> def alone(tokens):
        ...     document = [x[:, tokens] for x in (q, k, v, g, beta)]
        ...     return kda(*document, PackedSequence.from_lengths([document[0].shape[1]]))
        >>> torch.equal(out, torch.cat([alone(slice(0, 2)), alone(slice(2, 5))], 1))
        True

    As one document, the last three tokens would read the state of the first two:

        >>> leaking = kda(q, k, v, g, beta, PackedSequence.from_lengths([5]))
        >>> torch.equal(out[:, :2], leaking[:, :2]), torch.allclose(out[:, 2:], leaking[:, 2:])
        (True, False)
    """
    refuse_tree(packed, "for Kimi Delta Attention")
    if is_operator(packed):
        values = q, k, v, g, beta, qk_l2norm, backend
        return _in_graph(packed, *values)  # type: ignore[no-any-return]
    run = OP.running(backend, packed)
    return run(q, k, v, g, beta, packed, qk_l2norm)  # type: ignore[no-any-return]


_in_graph = operator(
    kda,
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, bool qk_l2norm, str backend",
    lambda q, k, v, *others: v.new_empty(v.shape),
)


__all__ = ["OP", "kda", "recurrent_kda"]
