"""Triton kernels of the cross entropy, and of log-probabilities and entropies: one program per
token, or per block of its logits, and per block of a sum of gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl

# parts of a block that share maxima and sums, for fewer exponentials; a part has to fill all
# threads, eight logits each: sums over parts must not cross threads
PARTS = tl.constexpr(4)


@triton.jit
def _tanh(x):
    """tanh x within 6e-8, by tanh |x| = (1 - exp(-2|x|)) / (1 + exp(-2|x|)), which does not
    overflow.
    """
    shrunk = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(x < 0, -size, size)


@triton.jit
def _through_head(value, before, after, HEAD: tl.constexpr, CAPPED: tl.constexpr, dtype):
    """Return z and dz / dvalue: z = after * tanh(before * value) where CAPPED, before * value where
    HEAD, each operation rounded to the logits' dtype as PyTorch does, else value.
    """
    slope = tl.full(value.shape, 1.0, tl.float32)
    if HEAD:
        value = (value * before).to(dtype).to(tl.float32)
        slope = slope * before
    if CAPPED:
        bent = _tanh(value).to(dtype).to(tl.float32)
        value = (bent * after).to(dtype).to(tl.float32)
        slope = slope * after * (1.0 - bent * bent)
    return value, slope


@triton.jit
def _places(BLOCK: tl.constexpr):
    """Where the logits of a block are in it, [PARTS, BLOCK / PARTS]."""
    WIDTH: tl.constexpr = BLOCK // PARTS
    return tl.arange(0, PARTS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit(do_not_specialize=["scale", "before", "after"])
def softmax_gradient(
    logits,
    targets,
    losses,
    scale,
    before,
    after,
    words,
    GRADIENT: tl.constexpr,
    HEAD: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """losses [C] = logsumexp(z) - z[target], where z is what `_through_head` makes of logits
    [C, V]; these become (softmax(z) - one-hot) * scale * dz / dlogits where GRADIENT.

    Maximum and sum come from one pass (Milakov and Gimelshein, arXiv:1805.02867), first for each
    place of a block's parts, then over these; a sum is rescaled once for all parts. The second pass
    runs backwards, because the end of a row is still in the cache. Grid: C tokens.
    """
    dtype: tl.constexpr = logits.dtype.element_ty
    WIDTH: tl.constexpr = BLOCK // PARTS
    row = tl.program_id(0)
    target = tl.load(targets + row)
    x = logits + row.to(tl.int64) * words
    place = _places(BLOCK)
    blocks = tl.cdiv(words, BLOCK)
    if target < 0:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for block in range(blocks):
                at = block * BLOCK + place
                tl.store(x + at, tl.zeros((PARTS, WIDTH), dtype), mask=at < words)
    else:
        # finite, so that a place without logits adds nothing
        m_i = tl.full((WIDTH,), -1e38, tl.float32)
        acc = tl.zeros((WIDTH,), tl.float32)
        for block in range(blocks):
            at = block * BLOCK + place
            value = tl.load(x + at, mask=at < words, other=float("-inf")).to(tl.float32)
            value, _ = _through_head(value, before, after, HEAD, CAPPED, dtype)
            if HEAD:
                value = tl.where(at < words, value, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(value, 0))
            acc = acc * tl.exp(m_i - m_new) + tl.sum(tl.exp(value - m_new[None, :]), 0)
            m_i = m_new
        # before the barriers of the two sums below, behind which other warps overwrite it
        chosen = tl.load(x + target, mask=target < words, other=float("nan")).to(tl.float32)
        m = tl.max(m_i, 0)
        total = tl.sum(acc * tl.exp(m_i - m), 0)
        chosen, _ = _through_head(chosen, before, after, HEAD, CAPPED, dtype)
        tl.store(losses + row, tl.log(total) + m - chosen)
        if GRADIENT:
            factor = scale / total
            for back in range(blocks):
                at = (blocks - 1 - back) * BLOCK + place
                value = tl.load(x + at, mask=at < words, other=0.0).to(tl.float32)
                value, slope = _through_head(value, before, after, HEAD, CAPPED, dtype)
                gradient = tl.exp(value - m) * factor - tl.where(at == target, scale, 0.0)
                tl.store(x + at, (gradient * slope).to(dtype), mask=at < words)


@triton.jit
def token_statistics(
    logits,
    targets,
    inverse,
    log_z,
    log_probs,
    entropy,
    top1,
    log_sum_sq_probs,
    mean_logits,
    words,
    ENTROPY: tl.constexpr,
    TOP1: tl.constexpr,
    MOMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Statistics [C] of z [C, V] = logits * inverse, from one pass, first for each place of a
    block's parts, then over these.

    m_i is the maximum so far, acc = sum exp(z - m_i), drop = sum exp(z - m_i) (z - m_i): the
    entropy is log(acc) - drop / acc, which does not cancel numbers of z's size. Grid: C tokens.
    """
    WIDTH: tl.constexpr = BLOCK // PARTS
    row = tl.program_id(0)
    factor = tl.load(inverse + row)
    x = logits + row.to(tl.int64) * words
    place = _places(BLOCK)
    # finite, so that a place without logits adds nothing
    m_i = tl.full((WIDTH,), -1e38, tl.float32)
    acc = tl.zeros((WIDTH,), tl.float32)
    drop = tl.zeros((WIDTH,), tl.float32)
    squares = tl.zeros((WIDTH,), tl.float32)
    sums = tl.zeros((WIDTH,), tl.float32)
    best = tl.zeros((WIDTH,), tl.int32)
    for block in range(tl.cdiv(words, BLOCK)):
        at = block * BLOCK + place
        z = tl.load(x + at, mask=at < words, other=float("-inf")).to(tl.float32) * factor
        m_new = tl.maximum(m_i, tl.max(z, 0))
        shrink = tl.exp(m_i - m_new)
        below = z - m_new[None, :]
        part = tl.exp(below)
        if ENTROPY:
            # 0 log 0 is 0
            more = tl.where(part == 0.0, 0.0, part * below)
            drop = shrink * (drop + (m_i - m_new) * acc) + tl.sum(more, 0)
        if TOP1:
            first = tl.min(tl.where(z == m_new[None, :], at, 2147483647), 0)
            best = tl.where(m_new > m_i, first, best)
        if MOMENTS:
            squares = squares * shrink * shrink + tl.sum(part * part, 0)
            sums += tl.sum(tl.where(at < words, z, 0.0), 0)
        acc = acc * shrink + tl.sum(part, 0)
        m_i = m_new
    m = tl.max(m_i, 0)
    shrink = tl.exp(m_i - m)
    total = tl.sum(acc * shrink, 0)
    log_total = tl.log(total)
    tl.store(log_z + row, m + log_total)
    target = tl.load(targets + row)
    is_word = (target >= 0) & (target < words)
    chosen = tl.load(x + target, mask=is_word, other=float("nan")).to(tl.float32)
    tl.store(log_probs + row, tl.where(target < 0, 0.0, chosen * factor - m - log_total))
    if ENTROPY:
        dropped = tl.sum(shrink * (drop + (m_i - m) * acc), 0)
        tl.store(entropy + row, log_total - dropped / total)
    if TOP1:
        tl.store(top1 + row, tl.min(tl.where(m_i == m, best, 2147483647), 0).to(tl.int64))
    if MOMENTS:
        squared = tl.sum(squares * shrink * shrink, 0)
        tl.store(log_sum_sq_probs + row, tl.log(squared) - 2 * log_total)
        tl.store(mean_logits + row, tl.sum(sums, 0) / words)


@triton.jit
def token_gradient(
    logits,
    targets,
    inverse,
    log_z,
    entropy,
    of_log_probs,
    of_entropy,
    words,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """logits [C, V] become their gradient: inverse * (g (one-hot - p) - h p (log p + H)).

    Grid: C tokens, blocks of the vocabulary.
    """
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    factor = tl.load(inverse + row)
    g = tl.load(of_log_probs + row)
    x = logits + row.to(tl.int64) * words + at
    z = tl.load(x, mask=at < words, other=float("-inf")).to(tl.float32) * factor
    log_p = z - tl.load(log_z + row)
    p = tl.exp(log_p)
    gradient = tl.where(at == target, g, 0.0) - g * p
    if ENTROPY:
        more = tl.load(of_entropy + row) * p * (log_p + tl.load(entropy + row))
        # 0 log 0 is 0
        gradient -= tl.where(p == 0.0, 0.0, more)
    gradient = tl.where(target < 0, 0.0, gradient * factor)
    tl.store(x, gradient.to(logits.dtype.element_ty), mask=at < words)


@triton.jit
def scaled(gradient, factor, out, count, BLOCK: tl.constexpr):
    """out = gradient * factor, a scalar, both fp32, over `count` elements, rounded to out's dtype.

    Grid: blocks of them.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(gradient + at, mask=at < count, other=0.0) * tl.load(factor)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < count)
