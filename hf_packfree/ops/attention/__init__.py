"""Causal softmax attention that stops at document boundaries: one public function, one file per
backend.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hf_packfree.ops.attention import cudnn, torch_native, triton_native, varlen
from hf_packfree.ops.backend import Backend, find
from hf_packfree.packing import PackedSequence

BACKENDS = {
    "triton": Backend(triton_native.attend, triton_native.unusable, "triton", batch_invariant=True),
    "varlen": Backend(varlen.attend, varlen.unusable, batch_invariant=True),
    "torch": Backend(torch_native.attend),
}
LONG = {"triton": Backend(cudnn.attend, triton_native.unusable)}
"""Those that hand long documents to cuDNN, where that runs."""
WITH_HISTORY = {
    "triton": Backend(
        partial(torch_native.attend_with_history, run=cudnn.attend), triton_native.unusable
    ),
    "varlen": Backend(varlen.attend_with_history, varlen.unusable),
    "torch": Backend(torch_native.attend_with_history),
}
"""Those whose first document may have keys before its first query."""


def hands_over_on(device: torch.device, backend: str, head_size: int) -> bool:
    """Return whether a backend hands long documents to cuDNN on a device, if batch invariance is
    not wanted.
    """
    return backend in LONG and cudnn.takes(head_size, device)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedSequence,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    batch_invariant: bool = False,
    backend: str = "torch",
) -> Tensor:
    """Attend causally within each document of a packed row.

    Args:
        q: [1, T, H, D], any floating dtype.
        k, v: [1, T, HK, D]; HK divides H, and query head j reads key head j // (H / HK).
        packed: the documents of the row.
        scale: factor on q.k before the softmax; D ** -0.5 if not given.
        dropout: probability of dropping an attention weight; above 0 "torch" attends, whatever the
            backend.
        batch_invariant: attend in the same kernels whatever is in the row. Otherwise a backend of
            `LONG` hands documents of 8,192 tokens and more to cuDNN where that has kernels for
            them, which is faster; see `cudnn.py`.
        backend: a name in `BACKENDS`.

    Returns:
        [1, T, H, D] in q's dtype. Memory grows with T, not with T x T, where torch has a flash
        kernel for the dtype.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    attend = find("attention", BACKENDS if batch_invariant else BACKENDS | LONG, backend)
    # which "torch" alone has
    if dropout:
        return torch_native.attend(q, k, v, packed, scale=scale, dropout=dropout)
    return attend(q, k, v, packed, scale=scale)  # type: ignore[no-any-return]


def attention_with_history(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedSequence,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    backend: str = "torch",
) -> Tensor:
    """Attend causally within each document of a row whose first one began before it.

    Args:
        q: [1, T, H, D].
        k, v: [1, h + T, HK, D]: of the h tokens of the first document that are before the row, and
            of the row.
        packed: the documents of the row of T tokens.
        scale, dropout: see `attention`.
        backend: a name in `WITH_HISTORY`.

    Returns:
        [1, T, H, D] in q's dtype: what `attention` gives those tokens in the longer row.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    attend = find("attention with history", WITH_HISTORY, backend)
    if dropout:
        return torch_native.attend_with_history(q, k, v, packed, scale=scale, dropout=dropout)
    return attend(q, k, v, packed, scale=scale)  # type: ignore[no-any-return]


__all__ = ["BACKENDS", "WITH_HISTORY", "attention", "attention_with_history"]
