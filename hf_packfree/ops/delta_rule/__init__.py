"""The gated delta rule over packed documents: one public function, one file per backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_packfree.ops.backend import Backend, LongDocuments
from hf_packfree.ops.delta_rule import (
    across_ranks,
    fla,
    fla_segments,
    flash_qla,
    flash_qla_segments,
    torch_chunked,
)
from hf_packfree.ops.delta_rule.reference import (
    recurrent_gated_delta_rule,
    recurrent_gated_delta_rule_with_states,
)
from hf_packfree.ops.delta_rule.segments import Scans
from hf_packfree.ops.in_graph import is_operator, operator
from hf_packfree.ops.op import AcrossRanks, Op, Way
from hf_packfree.ops.tree_paths import delta_rule_along_paths
from hf_packfree.packing import PackedSequence, refuse_shard
from hf_packfree.packing.tree import refuse_tree
from hf_packfree.parallel.costs import cheaper_for_gdn


@dataclass(frozen=True)
class DeltaRuleBackend(Backend):
    """One implementation of the gated delta rule.

    Attributes:
        with_states: runs every document from an initial state and returns the final states, see
            `gated_delta_rule_with_states`; None: it cannot.
        scans: walks segments of documents in parallel, by which ranks that share a row exchange
            states, see `hf_packfree.ops.delta_rule.across_ranks`; None: it cannot.
    """

    with_states: Callable[..., tuple[Tensor, Tensor]] | None = None
    scans: Scans | None = None


def _cuts(device: torch.device, sizes: Mapping[str, int]) -> bool:
    return flash_qla_segments.cuts_on(device)


def _no_states(backend: DeltaRuleBackend) -> str | None:
    return "gives no states" if backend.scans is None else None


OP = Op(
    name="delta_rule",
    leaks="the recurrent state crosses document boundaries",
    backends={
        "flash_qla": DeltaRuleBackend(
            flash_qla.gated_delta_rule,
            flash_qla.unusable,
            "flash-qla",
            batch_invariant=True,
            compiles="minutes",
            long=LongDocuments(flash_qla_segments.gated_delta_rule, "in segments", _cuts),
            with_states=flash_qla.with_states,
            scans=flash_qla_segments.FlashQLAScans(),
            # other releases attach a plan to the offsets, which a captured graph would keep for the
            # next row
            bounded=flash_qla.is_known,
        ),
        "fla": DeltaRuleBackend(
            fla.gated_delta_rule,
            fla.unusable,
            "fla-core",
            batch_invariant=True,
            compiles="minutes",
            tuned=True,
            with_states=fla.with_states,
            scans=fla_segments.FLAScans(),
            bounded=True,
        ),
        "torch": DeltaRuleBackend(
            torch_chunked.gated_delta_rule,
            with_states=torch_chunked.with_states,
            scans=torch_chunked.TorchScans(),
        ),
    },
    slow_in_eager=True,
    across_ranks=AcrossRanks(
        {
            "heads": Way(across_ranks.delta_rule_by_heads, "heads", "key_heads"),
            "state": Way(across_ranks.delta_rule_by_states, "states", None, _no_states),
        },
        "gdn",
        of="Gated DeltaNet",
        cheaper=cheaper_for_gdn,
    ),
)


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
    """Run the gated delta rule (Yang et al., Gated Delta Networks, arXiv:2412.06464) on each
    document of a packed row.

    With S [K, V] a document's state, zero before its first token, every token in turn decays it,
    writes to it and reads it (eq. 10, S transposed; `recurrent_gated_delta_rule` is that, token by
    token):

        S <- exp(g) S;    S <- S + k (beta (v - k^T S));    o = (q K^-1/2)^T S

    In torch all arithmetic is fp32, or fp64 if q is fp64; the kernels multiply in q's dtype (fp32
    as TF32) and add in fp32.

    Args:
        q, k: [1, T, H, K], any floating dtype, any strides.
        v: [1, T, HV, V], HV a multiple of H; value head j reads key head j // (HV // H).
        g: [1, T, HV], log decay, at most 0.
        beta: [1, T, HV], write strength: between 0 and 1, or, where a model lets a token turn the
            state around (negative eigenvalues, arXiv:2411.12537), between 0 and 2.
        packed: the documents of the row; in a tree a segment begins with the state that its parent
            leaves.
        qk_l2norm: divide q and k by their L2 norms, x * rsqrt(sum(x^2) + 1e-6); False: they have
            norm 1 already.
        backend: a name in `OP.backends`. "flash_qla" cuts long documents into segments where that
            is faster: exact, but the rounding then depends on the row, see
            `hf_packfree.ops.delta_rule.segments`; "flash_qla, batch-invariant" walks every document
            whole, unless it is a path of a tree.

    Returns:
        [1, T, HV, V] in v's dtype. On the CPU the result is always batch-invariant, and each
        document's values are, bit for bit, those of the document alone. On other devices that
        depends on their matrix library.

    Raises:
        BackendUnavailable: no backend has that name.

    Two documents of two and three tokens, one head:

        >>> import torch
        >>> from hf_packfree import PackedSequence
        >>> from hf_packfree.ops.delta_rule import gated_delta_rule
        >>> q, k, v = (torch.randn(1, 5, 1, 4) for _ in range(3))
        >>> g, beta = -torch.rand(1, 5, 1), torch.rand(1, 5, 1)
        >>> out = gated_delta_rule(q, k, v, g, beta, PackedSequence.from_lengths([2, 3]))

    Each document gets what it gets in a call of its own:

        >>> def alone(tokens):
        ...     document = [x[:, tokens] for x in (q, k, v, g, beta)]
        ...     length = document[0].shape[1]
        ...     return gated_delta_rule(*document, PackedSequence.from_lengths([length]))
        >>> torch.equal(out, torch.cat([alone(slice(0, 2)), alone(slice(2, 5))], 1))
        True

    As one document, the last three tokens would read the state of the first two:

        >>> leaking = gated_delta_rule(q, k, v, g, beta, PackedSequence.from_lengths([5]))
        >>> torch.equal(out[:, :2], leaking[:, :2]), torch.allclose(out[:, 2:], leaking[:, 2:])
        (True, False)
    """
    if is_operator(packed):
        values = q, k, v, g, beta, qk_l2norm, backend
        return _in_graph(packed, *values)  # type: ignore[no-any-return]
    if packed.tree is not None:
        walk = partial(gated_delta_rule_with_states, qk_l2norm=qk_l2norm, backend=backend)
        return delta_rule_along_paths((q, k, v, g, beta), packed, walk)
    run = OP.running(backend, packed)
    return run(q, k, v, g, beta, packed, qk_l2norm)  # type: ignore[no-any-return]


_in_graph = operator(
    gated_delta_rule,
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, bool qk_l2norm, str backend",
    lambda q, k, v, *others: v.new_empty(v.shape),
)


def gated_delta_rule_with_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    packed: PackedSequence,
    initial_state: Tensor | None = None,
    *,
    qk_l2norm: bool = True,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule on each document from a given initial state, and return the final
    states too.

    A document cut in two gets the values and gradients of the whole document, if its second part
    begins with the final state of the first.

    Args:
        q, k, v, g, beta, packed, qk_l2norm: see `gated_delta_rule`.
        initial_state: [N, HV, K, V], fp32 (fp64 if q is), a state for each of the row's segments;
            zeros if not given.
        backend: a name in `OP.backends`.

    Returns:
        The output [1, T, HV, V] in v's dtype, and the final states, like `initial_state`. Gradients
        flow to all inputs, the initial state included, from both.

    Raises:
        BackendUnavailable: no backend has that name.
        UnsupportedInput: the row is a tree, or one rank's part of a row.
    """
    refuse_tree(packed, "where every segment begins with a state of its own")
    refuse_shard(packed, "the delta rule with states")
    run: Any = OP.backend(backend).with_states
    if initial_state is None:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        initial_state = q.new_zeros(
            packed.num_segments, v.shape[2], q.shape[3], v.shape[3], dtype=dtype
        )
    return run(q, k, v, g, beta, initial_state, packed, qk_l2norm)  # type: ignore[no-any-return]


__all__ = [
    "OP",
    "DeltaRuleBackend",
    "gated_delta_rule",
    "gated_delta_rule_with_states",
    "recurrent_gated_delta_rule",
    "recurrent_gated_delta_rule_with_states",
]
