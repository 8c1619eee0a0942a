"""The backward pass of `triton_kernels`, in its layout and notation: dq by blocks of queries,
dk and dv by blocks of keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_packfree.ops.attention.triton_kernels import (
    _block,
    _edge,
    _head_pointers,
    _seen,
    _tile,
)


@triton.jit
def _probs(a, b, lse, seen, scale, MASK: tl.constexpr):
    """Softmax weights of tiles a and b: queries and keys, or keys and queries for the transpose."""
    p = tl.exp2(tl.dot(a, tl.trans(b)) * scale - lse)
    if MASK:
        p = tl.where(seen, p, 0.0)
    return p


@triton.jit
def _attn_bwd_dq_inner(
    q,
    do,
    k,
    v,
    dq,
    lse,
    delta,
    offs_m,
    offs_n,
    k_stride,
    v_stride,
    offs_d,
    length,
    scale,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,
):
    """Add one block of keys to the queries' gradient."""
    keys = _tile(k, offs_n, k_stride, offs_d, length, MASK)
    values = _tile(v, offs_n, v_stride, offs_d, length, MASK)
    seen = _seen(offs_m[:, None], offs_n[None, :], WINDOW)
    ds = _probs(q, keys, lse, seen, scale, MASK) * (tl.dot(do, tl.trans(values)) - delta)
    return tl.dot(ds.to(keys.dtype), keys, dq)


@triton.jit(do_not_specialize=["tokens"])
def attn_bwd_dq(
    q,
    k,
    v,
    blocks,
    out,
    d_out,
    lse,
    delta,
    d_q,
    tokens,
    q_stride,
    k_stride,
    v_stride,
    scale,
    scale_back,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """d_q [T, H, D], and delta [H, T], the sums of out d_out over channels.  Grid: blocks, H."""
    first, start, length, _ = _block(blocks)
    head = tl.program_id(1)
    q, k, v = _head_pointers(q, k, v, first, head, q_stride, k_stride, v_stride, GROUP, D)
    head_offset = first * (HEADS * D) + head * D
    offs_d, offs_m = tl.arange(0, D), start + tl.arange(0, BLOCK_M)
    do = _tile(d_out + head_offset, offs_m, HEADS * D, offs_d, length, True)
    delta_i = tl.sum(
        do.to(tl.float32)
        * _tile(out + head_offset, offs_m, HEADS * D, offs_d, length, True).to(tl.float32),
        1,
    )
    tl.store(delta + head.to(tl.int64) * tokens + first + offs_m, delta_i, mask=offs_m < length)
    delta_i = delta_i[:, None]
    lse_i = tl.load(
        lse + head.to(tl.int64) * tokens + first + offs_m, mask=offs_m < length, other=0.0
    )[:, None]
    queries = _tile(q, offs_m, q_stride, offs_d, length, True)
    dq = tl.zeros([BLOCK_M, D], dtype=tl.float32)
    inner = 0
    if WINDOW:
        outer, inner = _edge(start, BLOCK_M, BLOCK_N, WINDOW)
        for edge_n in range(outer, inner, BLOCK_N):
            offs_n = edge_n + tl.arange(0, BLOCK_N)
            dq = _attn_bwd_dq_inner(
                queries,
                do,
                k,
                v,
                dq,
                lse_i,
                delta_i,
                offs_m,
                offs_n,
                k_stride,
                v_stride,
                offs_d,
                length,
                scale,
                WINDOW,
                True,
            )
    for start_n in range(inner, start, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        dq = _attn_bwd_dq_inner(
            queries,
            do,
            k,
            v,
            dq,
            lse_i,
            delta_i,
            offs_m,
            offs_n,
            k_stride,
            v_stride,
            offs_d,
            length,
            scale,
            WINDOW,
            False,
        )
    for diagonal_n in range(start, tl.minimum(start + BLOCK_M, length), BLOCK_N):
        offs_n = diagonal_n + tl.arange(0, BLOCK_N)
        dq = _attn_bwd_dq_inner(
            queries,
            do,
            k,
            v,
            dq,
            lse_i,
            delta_i,
            offs_m,
            offs_n,
            k_stride,
            v_stride,
            offs_d,
            length,
            scale,
            WINDOW,
            True,
        )
    offset = offs_m[:, None] * (HEADS * D) + offs_d[None, :]
    tl.store(
        d_q + head_offset + offset,
        (dq * scale_back).to(d_q.dtype.element_ty),
        mask=offs_m[:, None] < length,
    )


@triton.jit
def _steps(start, length, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """How many blocks of queries see any key of the block that starts at `start`."""
    end = length
    if WINDOW:
        end = tl.minimum(length, start + BLOCK_N + WINDOW - 1)
    return (end - start + BLOCK_M - 1) // BLOCK_M


@triton.jit
def _step(step, steps, begin, BLOCK_M: tl.constexpr):
    """A step's query head, among those of the key head, and its tokens in the document."""
    return (step // steps).to(tl.int64), begin + step % steps * BLOCK_M + tl.arange(0, BLOCK_M)


@triton.jit
def _query_heads_of(
    q,
    d_out,
    lse,
    first,
    head,
    tokens,
    q_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
):
    """Pointers to the document's q, d_out and lse of the query heads that read a key head."""
    q_head = head * GROUP
    return (
        q + first * q_stride + q_head * D,
        d_out + first * (HEADS * D) + q_head * D,
        lse + q_head.to(tl.int64) * tokens + first,
    )


@triton.jit
def _attn_bwd_dk(
    q,
    k,
    v,
    d_out,
    lse,
    delta,
    d_k,
    first,
    start,
    begin,
    length,
    tokens,
    q_stride,
    k_stride,
    v_stride,
    scale,
    scale_back,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
):
    """d_k of one block of keys."""
    head = tl.program_id(1)
    offs_d, offs_n = tl.arange(0, D), start + tl.arange(0, BLOCK_N)
    keys = _tile(k + first * k_stride + head * D, offs_n, k_stride, offs_d, length, True)
    values = _tile(v + first * v_stride + head * D, offs_n, v_stride, offs_d, length, True)
    q, d_out, lse = _query_heads_of(q, d_out, lse, first, head, tokens, q_stride, HEADS, GROUP, D)
    delta += head.to(tl.int64) * GROUP * tokens + first
    dk = tl.zeros([BLOCK_N, D], dtype=tl.float32)
    steps = _steps(start, length, BLOCK_M, BLOCK_N, WINDOW) - (begin - start) // BLOCK_M
    for step in tl.range(0, steps * GROUP, num_stages=STAGES):
        q_head, offs_m = _step(step, steps, begin, BLOCK_M)
        queries = _tile(q + q_head * D, offs_m, q_stride, offs_d, length, True)
        do = _tile(d_out + q_head * D, offs_m, HEADS * D, offs_d, length, True)
        lse_i = tl.load(lse + q_head * tokens + offs_m, mask=offs_m < length, other=0.0)[None, :]
        delta_i = tl.load(delta + q_head * tokens + offs_m, mask=offs_m < length, other=0.0)[
            None, :
        ]
        p = _probs(
            keys, queries, lse_i, _seen(offs_m[None, :], offs_n[:, None], WINDOW), scale, True
        )
        ds = p * (tl.dot(values, tl.trans(do)) - delta_i)
        dk = tl.dot(ds.to(queries.dtype), queries, dk)
    offset = (
        first * (HEADS // GROUP * D)
        + head * D
        + offs_n[:, None] * (HEADS // GROUP * D)
        + offs_d[None, :]
    )
    tl.store(
        d_k + offset, (dk * scale_back).to(d_k.dtype.element_ty), mask=offs_n[:, None] < length
    )


@triton.jit
def _attn_bwd_dv(
    q,
    k,
    d_out,
    lse,
    d_v,
    first,
    start,
    begin,
    length,
    tokens,
    q_stride,
    k_stride,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
):
    """d_v of one block of keys."""
    head = tl.program_id(1)
    offs_d, offs_n = tl.arange(0, D), start + tl.arange(0, BLOCK_N)
    keys = _tile(k + first * k_stride + head * D, offs_n, k_stride, offs_d, length, True)
    q, d_out, lse = _query_heads_of(q, d_out, lse, first, head, tokens, q_stride, HEADS, GROUP, D)
    dv = tl.zeros([BLOCK_N, D], dtype=tl.float32)
    steps = _steps(start, length, BLOCK_M, BLOCK_N, WINDOW) - (begin - start) // BLOCK_M
    for step in tl.range(0, steps * GROUP, num_stages=STAGES):
        q_head, offs_m = _step(step, steps, begin, BLOCK_M)
        queries = _tile(q + q_head * D, offs_m, q_stride, offs_d, length, True)
        lse_i = tl.load(lse + q_head * tokens + offs_m, mask=offs_m < length, other=0.0)[None, :]
        p = _probs(
            keys, queries, lse_i, _seen(offs_m[None, :], offs_n[:, None], WINDOW), scale, True
        )
        do = _tile(d_out + q_head * D, offs_m, HEADS * D, offs_d, length, True)
        dv = tl.dot(p.to(do.dtype), do, dv)
    offset = (
        first * (HEADS // GROUP * D)
        + head * D
        + offs_n[:, None] * (HEADS // GROUP * D)
        + offs_d[None, :]
    )
    tl.store(d_v + offset, dv.to(d_v.dtype.element_ty), mask=offs_n[:, None] < length)


@triton.jit(do_not_specialize=["tokens"])
def attn_bwd_dkdv(
    q,
    k,
    v,
    blocks,
    d_out,
    lse,
    delta,
    d_k,
    d_v,
    tokens,
    q_stride,
    k_stride,
    v_stride,
    scale,
    scale_back,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    KEY_STAGES: tl.constexpr,
    VALUE_STAGES: tl.constexpr,
):
    """d_k and d_v [T, HK, D], summed over the query heads of a key head, and over the queries from
    the block's first key on.

    Half of the programs compute d_k and half d_v, so that a short row leaves no SM idle: both sums
    in one program need more registers than there are, so the softmax weights are recomputed twice.
    Grid: blocks, HK, 2.
    """
    first, start, length, queried = _block(blocks)
    # d_k first, which takes longer
    if tl.program_id(2) == 0:
        _attn_bwd_dk(
            q,
            k,
            v,
            d_out,
            lse,
            delta,
            d_k,
            first,
            start,
            tl.maximum(start, queried),
            length,
            tokens,
            q_stride,
            k_stride,
            v_stride,
            scale,
            scale_back,
            HEADS,
            GROUP,
            D,
            BLOCK_M,
            BLOCK_N,
            WINDOW,
            KEY_STAGES,
        )
    else:
        _attn_bwd_dv(
            q,
            k,
            d_out,
            lse,
            d_v,
            first,
            start,
            tl.maximum(start, queried),
            length,
            tokens,
            q_stride,
            k_stride,
            scale,
            HEADS,
            GROUP,
            D,
            BLOCK_M,
            BLOCK_N,
            WINDOW,
            VALUE_STAGES,
        )
