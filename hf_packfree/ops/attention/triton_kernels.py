"""Triton kernels of causal attention within documents: no atomics, so a document's values and gradients are its own.

A row is cut into blocks from each document's own start, so that what a document meets does not depend on where it lies.
Every block is a program's, of a kernel or of half a kernel; `blocks` [B, 3] holds its document's first token in the row, its
own first token in the document and the document's length.  Tokens are counted from the document's start, in int32; only the
start itself is an int64.

Shapes: T tokens, H query heads, HK key heads, D channels, GROUP = H / HK query heads of a key head; blocks of ROWS queries
or COLUMNS keys.  Softmax and its gradients as in FlashAttention-2 (arXiv 2307.08691, algorithms 1 and 2), in powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _block(blocks):
    """The document's first token in the row, the block's in the document, and the document's length."""
    place = blocks + tl.program_id(0) * 3
    return tl.load(place).to(tl.int64), tl.load(place + 1), tl.load(place + 2)


@triton.jit
def _views(q, k, v, first, head, q_stride, k_stride, v_stride, GROUP: tl.constexpr, D: tl.constexpr):
    """The document's tokens of one query head, and of the key head that it reads."""
    key = head // GROUP * D
    return q + first * q_stride + head * D, k + first * k_stride + key, v + first * v_stride + key


@triton.jit
def _tile(x, token, stride, channel, length, MASK: tl.constexpr):
    """Tokens of x [tokens, D]; zeros past the document where MASK: what lies there may be anything, NaN too."""
    if MASK:
        return tl.load(x + token[:, None] * stride + channel[None, :], mask=token[:, None] < length, other=0.0)
    return tl.load(x + token[:, None] * stride + channel[None, :])


@triton.jit
def _meet(q, k, v, mixed, top, total, row, column, k_stride, v_stride, channel, length, scale, MASK: tl.constexpr):
    """Queries meet one block of keys: what they have mixed, the highest score and the sum of weights so far."""
    keys = _tile(k, column, k_stride, channel, length, MASK)
    score = tl.dot(q, tl.trans(keys)) * scale
    if MASK:
        score = tl.where(row[:, None] >= column[None, :], score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    p, fade = tl.exp2(score - higher[:, None]), tl.exp2(top - higher)
    values = _tile(v, column, v_stride, channel, length, MASK)
    mixed = tl.dot(p.to(values.dtype), values, mixed * fade[:, None])
    return mixed, higher, total * fade + tl.sum(p, 1)


@triton.jit(do_not_specialize=["tokens"])
def attend(
    q, k, v, blocks, out, lse, tokens, q_stride, k_stride, v_stride, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """out [T, H, D], and lse [H, T], the base-2 logarithms of the softmax's sums; `scale` holds log2(e).  Grid: blocks, H."""
    first, start, length = _block(blocks)
    head = tl.program_id(1)
    q, k, v = _views(q, k, v, first, head, q_stride, k_stride, v_stride, GROUP, D)
    out += first * (HEADS * D) + head * D
    lse += head.to(tl.int64) * tokens + first
    channel, row = tl.arange(0, D), start + tl.arange(0, ROWS)
    queries = _tile(q, row, q_stride, channel, length, True)
    mixed = tl.zeros([ROWS, D], dtype=tl.float32)
    top, total = tl.full([ROWS], float("-inf"), dtype=tl.float32), tl.zeros([ROWS], dtype=tl.float32)
    for past in range(0, start, COLUMNS):
        column = past + tl.arange(0, COLUMNS)
        mixed, top, total = _meet(
            queries, k, v, mixed, top, total, row, column, k_stride, v_stride, channel, length, scale, False
        )
    for present in range(start, tl.minimum(start + ROWS, length), COLUMNS):
        column = present + tl.arange(0, COLUMNS)
        mixed, top, total = _meet(
            queries, k, v, mixed, top, total, row, column, k_stride, v_stride, channel, length, scale, True
        )
    place = row[:, None] * (HEADS * D) + channel[None, :]
    tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=row[:, None] < length)
    tl.store(lse + row, top + tl.log2(total), mask=row < length)


@triton.jit
def _weights(a, b, lse, allowed, scale, MASK: tl.constexpr):
    """What a's tokens and b's make of each other, queries and keys or the other way round, after the softmax."""
    p = tl.exp2(tl.dot(a, tl.trans(b)) * scale - lse)
    if MASK:
        p = tl.where(allowed, p, 0.0)
    return p


@triton.jit
def _pull(q, d_out, k, v, d_q, lse, delta, row, column, k_stride, v_stride, channel, length, scale, MASK: tl.constexpr):
    """Add to the queries' gradient what one block of keys gives."""
    keys = _tile(k, column, k_stride, channel, length, MASK)
    values = _tile(v, column, v_stride, channel, length, MASK)
    allowed = row[:, None] >= column[None, :]
    d_score = _weights(q, keys, lse, allowed, scale, MASK) * (tl.dot(d_out, tl.trans(values)) - delta)
    return tl.dot(d_score.to(keys.dtype), keys, d_q)


@triton.jit(do_not_specialize=["tokens"])
def attend_backward_queries(
    q, k, v, blocks, out, d_out, lse, delta, d_q, tokens, q_stride, k_stride, v_stride, scale, scale_back,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """d_q [T, H, D], and delta [H, T], the sums of out d_out over channels.  Grid: blocks, H."""
    first, start, length = _block(blocks)
    head = tl.program_id(1)
    q, k, v = _views(q, k, v, first, head, q_stride, k_stride, v_stride, GROUP, D)
    here = first * (HEADS * D) + head * D
    channel, row = tl.arange(0, D), start + tl.arange(0, ROWS)
    d = _tile(d_out + here, row, HEADS * D, channel, length, True)
    sums = tl.sum(d.to(tl.float32) * _tile(out + here, row, HEADS * D, channel, length, True).to(tl.float32), 1)
    tl.store(delta + head.to(tl.int64) * tokens + first + row, sums, mask=row < length)
    sums = sums[:, None]
    top = tl.load(lse + head.to(tl.int64) * tokens + first + row, mask=row < length, other=0.0)[:, None]
    queries = _tile(q, row, q_stride, channel, length, True)
    d_queries = tl.zeros([ROWS, D], dtype=tl.float32)
    for past in range(0, start, COLUMNS):
        column = past + tl.arange(0, COLUMNS)
        d_queries = _pull(
            queries, d, k, v, d_queries, top, sums, row, column, k_stride, v_stride, channel, length, scale, False
        )
    for present in range(start, tl.minimum(start + ROWS, length), COLUMNS):
        column = present + tl.arange(0, COLUMNS)
        d_queries = _pull(
            queries, d, k, v, d_queries, top, sums, row, column, k_stride, v_stride, channel, length, scale, True
        )
    place = row[:, None] * (HEADS * D) + channel[None, :]
    tl.store(d_q + here + place, (d_queries * scale_back).to(d_q.dtype.element_ty), mask=row[:, None] < length)


@triton.jit
def _step(step, steps, start, ROWS: tl.constexpr):
    """Which query head of those that read the key head comes at this step, and which of the document's tokens."""
    return (step // steps).to(tl.int64), start + step % steps * ROWS + tl.arange(0, ROWS)


@triton.jit
def _readers(q, d_out, lse, first, head, tokens, q_stride, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr):
    """Of the query heads that read a key head: the document's queries, the gradients of what they mixed, and softmax sums."""
    member = head * GROUP
    return (
        q + first * q_stride + member * D, d_out + first * (HEADS * D) + member * D, lse + member.to(tl.int64) * tokens + first
    )


@triton.jit
def _keys_gradient(
    q, k, v, d_out, lse, delta, d_k, first, start, length, tokens, q_stride, k_stride, v_stride, scale, scale_back,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """d_k of one block of keys."""
    head = tl.program_id(1)
    channel, column = tl.arange(0, D), start + tl.arange(0, COLUMNS)
    keys = _tile(k + first * k_stride + head * D, column, k_stride, channel, length, True)
    values = _tile(v + first * v_stride + head * D, column, v_stride, channel, length, True)
    q, d_out, lse = _readers(q, d_out, lse, first, head, tokens, q_stride, HEADS, GROUP, D)
    delta += head.to(tl.int64) * GROUP * tokens + first
    d_keys = tl.zeros([COLUMNS, D], dtype=tl.float32)
    steps = (length - start + ROWS - 1) // ROWS
    for step in tl.range(0, steps * GROUP, num_stages=STAGES):
        member, row = _step(step, steps, start, ROWS)
        queries = _tile(q + member * D, row, q_stride, channel, length, True)
        d = _tile(d_out + member * D, row, HEADS * D, channel, length, True)
        top = tl.load(lse + member * tokens + row, mask=row < length, other=0.0)[None, :]
        sums = tl.load(delta + member * tokens + row, mask=row < length, other=0.0)[None, :]
        p = _weights(keys, queries, top, row[None, :] >= column[:, None], scale, True)
        d_score = p * (tl.dot(values, tl.trans(d)) - sums)
        d_keys = tl.dot(d_score.to(queries.dtype), queries, d_keys)
    place = first * (HEADS // GROUP * D) + head * D + column[:, None] * (HEADS // GROUP * D) + channel[None, :]
    tl.store(d_k + place, (d_keys * scale_back).to(d_k.dtype.element_ty), mask=column[:, None] < length)


@triton.jit
def _values_gradient(
    q, k, d_out, lse, d_v, first, start, length, tokens, q_stride, k_stride, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """d_v of one block of keys."""
    head = tl.program_id(1)
    channel, column = tl.arange(0, D), start + tl.arange(0, COLUMNS)
    keys = _tile(k + first * k_stride + head * D, column, k_stride, channel, length, True)
    q, d_out, lse = _readers(q, d_out, lse, first, head, tokens, q_stride, HEADS, GROUP, D)
    d_values = tl.zeros([COLUMNS, D], dtype=tl.float32)
    steps = (length - start + ROWS - 1) // ROWS
    for step in tl.range(0, steps * GROUP, num_stages=STAGES):
        member, row = _step(step, steps, start, ROWS)
        queries = _tile(q + member * D, row, q_stride, channel, length, True)
        top = tl.load(lse + member * tokens + row, mask=row < length, other=0.0)[None, :]
        p = _weights(keys, queries, top, row[None, :] >= column[:, None], scale, True)
        d = _tile(d_out + member * D, row, HEADS * D, channel, length, True)
        d_values = tl.dot(p.to(d.dtype), d, d_values)
    place = first * (HEADS // GROUP * D) + head * D + column[:, None] * (HEADS // GROUP * D) + channel[None, :]
    tl.store(d_v + place, d_values.to(d_v.dtype.element_ty), mask=column[:, None] < length)


@triton.jit(do_not_specialize=["tokens"])
def attend_backward_pairs(
    q, k, v, blocks, d_out, lse, delta, d_k, d_v, tokens, q_stride, k_stride, v_stride, scale, scale_back,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KEY_STAGES: tl.constexpr, VALUE_STAGES: tl.constexpr,
):
    """d_k and d_v [T, HK, D], summed over the query heads that read them; queries from a block's own on.

    Each is half of the programs, side by side, so that a short row keeps the GPU busy: both sums at once in one program
    need more registers than there are, so weights are made a third time.  Grid: blocks, HK, 2.
    """
    first, start, length = _block(blocks)
    if tl.program_id(2) == 0:  # the longer half first
        _keys_gradient(
            q, k, v, d_out, lse, delta, d_k, first, start, length, tokens, q_stride, k_stride, v_stride, scale, scale_back,
            HEADS, GROUP, D, ROWS, COLUMNS, KEY_STAGES,
        )
    else:
        _values_gradient(
            q, k, d_out, lse, d_v, first, start, length, tokens, q_stride, k_stride, scale,
            HEADS, GROUP, D, ROWS, COLUMNS, VALUE_STAGES,
        )
