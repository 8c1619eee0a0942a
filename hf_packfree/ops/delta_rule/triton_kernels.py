"""The Triton kernel that folds segments' transitions and states; shapes as in `segments.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fold_states(
    transition,
    addend,
    given,
    firsts,
    out,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """out [S, HEADS, K, V], one document's segments in turn. Grid: documents, HEADS, blocks of
    COLUMNS.
    """
    document, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(firsts + document), tl.load(firsts + document + 1)
    row = tl.arange(0, BLOCK_K)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    place = row[:, None] * V + column[None, :]
    inside = (row[:, None] < K) & (column[None, :] < V)
    square = row[None, :] * K + row[:, None] if REVERSE else row[:, None] * K + row[None, :]
    known = (row[:, None] < K) & (row[None, :] < K)
    state = tl.zeros([BLOCK_K, COLUMNS], dtype=tl.float32)
    if given is not None:
        state = tl.load(
            given + (document * HEADS + head).to(tl.int64) * K * V + place, mask=inside, other=0.0
        )
    for step in range(end - first):
        segment = ((end - 1 - step if REVERSE else first + step) * HEADS + head).to(tl.int64)
        tl.store(out + segment * K * V + place, state, mask=inside)
        # the state after the last segment is not needed
        if step < end - first - 1:
            step_by = tl.load(transition + segment * K * K + square, mask=known, other=0.0)
            added = tl.load(addend + segment * K * V + place, mask=inside, other=0.0)
            state = tl.dot(step_by, state, added, input_precision="tf32x3")
