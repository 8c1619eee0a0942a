"""Which chunk of which document each block of a kernel works on; and the documents of a row, for
the stand-ins.
"""

from __future__ import annotations

import torch
from torch import Tensor

Spans = list[tuple[int, int, int]]
"""(row, start, stop) of every document."""


def prepare_chunk_indices(
    cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None
) -> Tensor:
    """Return [NC, 2]: (document, chunk within it), in cu_seqlens's dtype and on its device."""
    lengths = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).diff().tolist()
    pairs = [
        (number, chunk)
        for number, length in enumerate(lengths)
        for chunk in range(-(-length // chunk_size))
    ]
    return torch.tensor(pairs, dtype=cu_seqlens.dtype, device=cu_seqlens.device).reshape(-1, 2)


def spans_of(x: Tensor, cu_seqlens: Tensor | None, initial_state: Tensor | None) -> Spans:
    """Return the documents of x [B, T, ...]: its rows, or what `cu_seqlens` says of its only row.

    Raises:
        ValueError: several rows with cu_seqlens, or another number of states than of documents.
    """
    rows, tokens = x.shape[:2]
    if cu_seqlens is None:
        return [(row, 0, tokens) for row in range(rows)]
    if rows != 1:
        raise ValueError(f"`cu_seqlens` takes a batch of 1, found {rows}: flatten the rows first")
    edges = cu_seqlens.tolist()
    if initial_state is not None and len(initial_state) != len(edges) - 1:
        raise ValueError(f"{len(initial_state)} initial states for {len(edges) - 1} sequences")
    return [(0, start, stop) for start, stop in zip(edges, edges[1:])]


def check_chunk_indices(
    chunk_indices: Tensor | None, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None
) -> None:
    """The kernels trust these two; the stand-in does not: each must be what cu_seqlens implies."""
    if cu_seqlens_cpu is not None:
        assert cu_seqlens is not None and cu_seqlens_cpu.device.type == "cpu"
        assert cu_seqlens_cpu.tolist() == cu_seqlens.tolist(), (
            "cu_seqlens_cpu is not a copy of cu_seqlens"
        )
    if chunk_indices is not None:
        assert cu_seqlens is not None, "chunk_indices without cu_seqlens"
        wanted = prepare_chunk_indices(cu_seqlens, 64)
        assert torch.equal(chunk_indices, wanted), "chunk_indices are not those of 64-token chunks"
