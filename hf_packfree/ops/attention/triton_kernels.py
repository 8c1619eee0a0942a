"""Triton kernels of causal attention within documents: without atomics, so a document's values and
gradients do not depend on the rest of the row.

A row is cut into blocks from each document's own start, so that a document's blocks do not depend
on what else is in the row. A program works on one block; `blocks` [B, 4] holds the document's first
token in the row, the block's first token in the document, the document's length, and the document's
first token whose query is computed: tokens before that one serve as keys only. Tokens are counted
from the document's start, in int32; only the start itself is an int64.

Shapes: T tokens, H query heads, HK key heads, D channels, GROUP = H / HK query heads of a key head;
blocks of BLOCK_M queries or BLOCK_N keys. Softmax and its gradients as in FlashAttention-2 (arXiv
2307.08691, algorithms 1 and 2), in powers of two. A query sees WINDOW tokens, itself included; 0:
all before it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _block(blocks):
    """Load this program's row of `blocks`: the document's first token in the row, the block's first
    token in the document, the document's length, and its first token whose query is computed.
    """
    offset = blocks + tl.program_id(0) * 4
    first, start = tl.load(offset).to(tl.int64), tl.load(offset + 1)
    return first, start, tl.load(offset + 2), tl.load(offset + 3)


@triton.jit
def _head_pointers(
    q, k, v, first, head, q_stride, k_stride, v_stride, GROUP: tl.constexpr, D: tl.constexpr
):
    """Pointers to the document's q of one query head, and to k and v of the key head that it
    reads.
    """
    key = head // GROUP * D
    return q + first * q_stride + head * D, k + first * k_stride + key, v + first * v_stride + key


@triton.jit
def _tile(x, token, stride, offs_d, length, MASK: tl.constexpr):
    """Tokens of x [tokens, D]; zeros past the document where MASK, since the next document's values
    may be NaN.
    """
    if MASK:
        return tl.load(
            x + token[:, None] * stride + offs_d[None, :], mask=token[:, None] < length, other=0.0
        )
    return tl.load(x + token[:, None] * stride + offs_d[None, :])


@triton.jit
def _seen(query, key, WINDOW: tl.constexpr):
    """Whether each query sees each key; both are counted from the start of one document."""
    seen = query >= key
    if WINDOW:
        seen &= query - key < WINDOW
    return seen


@triton.jit
def _edge(start, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Of the keys before a block of queries, rounded to whole blocks of keys: the first key that
    any of the queries sees, and the first key that all of them see.
    """
    some = tl.maximum(start - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    every = tl.cdiv(tl.maximum(start + BLOCK_M - WINDOW, 0), BLOCK_N) * BLOCK_N
    return some, tl.minimum(every, start)


@triton.jit
def _attn_fwd_inner(
    q,
    k,
    v,
    acc,
    m_i,
    l_i,
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
    """One block of keys in the online softmax: returns acc, the running maximum m_i and the
    running sum l_i.
    """
    keys = _tile(k, offs_n, k_stride, offs_d, length, MASK)
    qk = tl.dot(q, tl.trans(keys)) * scale
    if MASK:
        # not -inf: with a window a query may see no key of its first block, and the next maximum
        # then multiplies that block's sums by zero
        qk = tl.where(_seen(offs_m[:, None], offs_n[None, :], WINDOW), qk, -1e30)
    m_ij = tl.maximum(m_i, tl.max(qk, 1))
    p, alpha = tl.exp2(qk - m_ij[:, None]), tl.exp2(m_i - m_ij)
    values = _tile(v, offs_n, v_stride, offs_d, length, MASK)
    acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None])
    return acc, m_ij, l_i * alpha + tl.sum(p, 1)


@triton.jit(do_not_specialize=["tokens"])
def attn_fwd(
    q,
    k,
    v,
    blocks,
    sinks,
    out,
    lse,
    tokens,
    q_stride,
    k_stride,
    v_stride,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """out [T, H, D], and lse [H, T], the base-2 logarithms of the softmax's sums; `scale` and
    `sinks` [H], fp32 or None, hold log2(e). Grid: blocks, H.
    """
    first, start, length, _ = _block(blocks)
    # the block is of an empty document, which only fills up a bounded plan
    if length == 0:
        return
    head = tl.program_id(1)
    q, k, v = _head_pointers(q, k, v, first, head, q_stride, k_stride, v_stride, GROUP, D)
    out += first * (HEADS * D) + head * D
    lse += head.to(tl.int64) * tokens + first
    offs_d, offs_m = tl.arange(0, D), start + tl.arange(0, BLOCK_M)
    queries = _tile(q, offs_m, q_stride, offs_d, length, True)
    acc = tl.zeros([BLOCK_M, D], dtype=tl.float32)
    m_i, l_i = (
        tl.full([BLOCK_M], float("-inf"), dtype=tl.float32),
        tl.zeros([BLOCK_M], dtype=tl.float32),
    )
    if sinks is not None:
        # one more key in front, of value zero
        m_i, l_i = tl.maximum(m_i, tl.load(sinks + head)), l_i + 1.0
    inner = 0
    if WINDOW:
        outer, inner = _edge(start, BLOCK_M, BLOCK_N, WINDOW)
        for edge_n in range(outer, inner, BLOCK_N):
            offs_n = edge_n + tl.arange(0, BLOCK_N)
            acc, m_i, l_i = _attn_fwd_inner(
                queries,
                k,
                v,
                acc,
                m_i,
                l_i,
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
        acc, m_i, l_i = _attn_fwd_inner(
            queries,
            k,
            v,
            acc,
            m_i,
            l_i,
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
        acc, m_i, l_i = _attn_fwd_inner(
            queries,
            k,
            v,
            acc,
            m_i,
            l_i,
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
        out + offset, (acc / l_i[:, None]).to(out.dtype.element_ty), mask=offs_m[:, None] < length
    )
    tl.store(lse + offs_m, m_i + tl.log2(l_i), mask=offs_m < length)
