"""Simple gated linear attention, with the signature and the checks of fla-core 0.6.0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.ops.utils.index import check_chunk_indices, spans_of

__all__ = ["chunk_simple_gla"]


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Every output as the sum over what its document wrote before, in fp64; see `recurrence.py`."""
    if g is None or g_gamma is not None or initial_state is not None or output_final_state:
        raise NotImplementedError("the stand-in has decays per token and keeps no states")
    if kwargs:
        raise NotImplementedError(f"the stand-in knows no {sorted(kwargs)}")
    if not q.shape[:3] == k.shape[:3] == v.shape[:3] == g.shape:
        raise ValueError("q, k, v and g have other tokens or heads than each other")
    check_chunk_indices(None, cu_seqlens, cu_seqlens_cpu)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    rows = []
    for row, start, stop in spans_of(q, cu_seqlens, initial_state):
        query, key, value, decay = (
            x[row, start:stop].double().transpose(0, 1) for x in (q, k, v, g[..., None])
        )
        total = decay.cumsum(1)
        future = torch.ones(stop - start, stop - start, dtype=torch.bool).triu(1)
        between = (total - total.mT).masked_fill(future, -torch.inf).exp()
        rows.append(((query @ key.mT * scale * between) @ value).transpose(0, 1))
    return torch.cat(rows)[None].to(q.dtype), None
