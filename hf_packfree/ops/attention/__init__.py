"""Causal softmax attention that stops at document boundaries: one public function, one file per
backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_packfree.errors import BackendUnavailable
from hf_packfree.ops.attention import (
    across_ranks,
    branches,
    cudnn,
    score_options,
    torch_native,
    triton_native,
    varlen,
)
from hf_packfree.ops.backend import Backend, LongDocuments, Target
from hf_packfree.ops.in_graph import is_operator, operator
from hf_packfree.ops.op import AcrossRanks, Op, Way
from hf_packfree.ops.tree_paths import attend_along_paths
from hf_packfree.packing import PackedSequence, refuse_shard


@dataclass(frozen=True)
class AttentionBackend(Backend):
    """One implementation of causal attention.

    Attributes:
        with_history: attends in a row whose first document began before the row: takes q
            [1, T, H, D], k and v [1, h + T, HK, D] of the h tokens before the row and of the row,
            and the record of the row's T tokens; None: it cannot.
        in_tree: attends in a row of shared prefixes; None: every path of the tree is run as a
            document, see `hf_packfree.ops.tree_paths`.
        with_options: attends with a window, a softcap or sinks, and with values of another size
            than keys, as far as `takes` lists them.
        takes: the names in `score_options.WANTED` that `with_options` supports.
    """

    with_history: Callable[..., Tensor] | None = None
    in_tree: Callable[..., Tensor] | None = None
    with_options: Callable[..., Tensor] | None = None
    takes: frozenset[str] = frozenset()


def _unless_lacking(
    unusable: Callable[[Target], str | None], takes: frozenset[str]
) -> Callable[[Target], str | None]:
    """Return an `unusable` that also refuses models whose attention needs options outside of
    `takes`.
    """
    return lambda target: score_options.refused(target, takes) or unusable(target)


def _cudnn_takes(device: torch.device, sizes: Mapping[str, int]) -> bool:
    return not sizes.get("sinks") and cudnn.takes(sizes.get("head_size", 0), device)


def _no_history(backend: AttentionBackend) -> str | None:
    return "attends to no keys before a row" if backend.with_history is None else None


_TRITON = frozenset({"window", "sinks"})
_VARLEN = frozenset({"window", "other_value_size"})


OP = Op(
    name="attention",
    leaks="keys of other documents are visible, or hidden behind a T x T mask",
    leaks_sometimes=True,
    backends={
        "triton": AttentionBackend(
            triton_native.attend,
            _unless_lacking(triton_native.unusable, _TRITON),
            "triton",
            batch_invariant=True,
            compiles="seconds",
            long=LongDocuments(cudnn.attend, "by cuDNN", _cudnn_takes),
            with_history=partial(torch_native.attend_with_history, run=cudnn.attend),
            bounded=True,
            with_options=triton_native.attend,
            takes=_TRITON,
        ),
        "varlen": AttentionBackend(
            varlen.attend,
            _unless_lacking(varlen.unusable, _VARLEN),
            kernel=varlen.KERNEL,
            batch_invariant=True,
            with_history=varlen.attend_with_history,
            bounded=True,
            with_options=varlen.attend,
            takes=_VARLEN,
        ),
        "torch": AttentionBackend(
            torch_native.attend,
            with_history=torch_native.attend_with_history,
            in_tree=branches.attend,
            with_options=score_options.attend,
            takes=frozenset(score_options.WANTED),
        ),
    },
    loaded=True,
    across_ranks=AcrossRanks(
        {
            "auto": Way(
                across_ranks.attend_by_row,
                "heads, or keys and values in rows of short documents",
                "query_heads",
                _no_history,
            ),
            "heads": Way(across_ranks.attend_by_heads, "heads", "query_heads"),
            "gather": Way(across_ranks.attend_by_keys, "keys and values", None, _no_history),
        },
        "attention",
        not_with=score_options.WANTED,
    ),
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedSequence,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str = "torch",
) -> Tensor:
    """Attend causally within each document of a packed row.

    Args:
        q: [1, T, H, D], any floating dtype.
        k: [1, T, HK, D]; HK divides H, and query head j reads key head j // (H / HK).
        v: [1, T, HK, DV].
        packed: the documents of the row; in a tree every token attends along its path.
        scale: factor on q.k before the softmax; D ** -0.5 if not given.
        dropout: probability of dropping an attention weight; above 0 "torch" attends, whatever the
            backend.
        window: how many tokens a query sees, itself included; all before it if not given. A
            backend's `takes` says whether it supports `window`, `softcap`, `sinks` and DV other
            than D.
        softcap: scores s are softcap * tanh(s / softcap).
        sinks: [H], the score of one more key in each query's softmax, whose value is zero.
        backend: a name in `OP.backends`. "triton" hands documents of 8,192 tokens and more to
            cuDNN where that has kernels for them, which is faster, see `cudnn.py`;
            "triton, batch-invariant" attends in the same kernels whatever is in the row.

    Returns:
        [1, T, H, DV] in q's dtype. Memory grows with T, not with T x T, where torch has a flash
        kernel for the dtype; with a softcap the scores of each document are in memory.

    Raises:
        BackendUnavailable: no backend has that name, or that backend lacks an option.
    """
    # the operator's backward pass runs the forward pass again, which would draw other dropout masks
    if is_operator(packed) and not dropout:
        # in graphs PyTorch computes the rotary embedding, which under autocast gives fp32 q and k
        q, k = q.to(v.dtype), k.to(v.dtype)
        values = q, k, v, scale, window, softcap, sinks, backend
        return _in_graph(packed, *values)  # type: ignore[no-any-return]
    scaled: dict[str, Any] = {"scale": scale}
    # only "torch" has dropout
    if dropout:
        backend, scaled["dropout"] = "torch", dropout
    found, attend = OP.backend(backend), OP.running(backend, packed)
    options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks}
    given = {name: value for name, value in options.items() if value is not None}
    needed = [*given, *["other_value_size"] * (q.shape[3] != v.shape[3])]
    if needed:
        refuse_shard(packed, f"attention with {' and '.join(needed)}")
        lacking = [score_options.WANTED[name] for name in needed if name not in found.takes]
        if lacking or found.with_options is None:
            raise BackendUnavailable(
                f"found {' and '.join(lacking)} for attention on {backend!r}; wanted what its "
                "kernels have; pass backend='torch'"
            )
        attend = partial(found.with_options, **given)
    elif packed.tree is not None and found.in_tree is not None:
        return found.in_tree(q, k, v, packed, **scaled)
    attend = partial(attend, **scaled)
    if packed.tree is not None:
        return attend_along_paths(q, k, v, packed, attend)
    return attend(q, k, v, packed)  # type: ignore[no-any-return]


_in_graph = operator(
    attention,
    "Tensor q, Tensor k, Tensor v, float? scale, int? window, float? softcap, Tensor? sinks, "
    "str backend",
    lambda q, k, v, *others: q.new_empty((*q.shape[:3], v.shape[3])),
)


__all__ = ["OP", "AttentionBackend", "attention"]
