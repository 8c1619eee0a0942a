"""Triton kernel of the cross entropy: one program a token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["scale"])
def softmax_gradient(
    logits, targets, losses, scale, words, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """losses [C] = logsumexp(logits) - logits[target]; logits [C, V] become (softmax - one-hot) *
    scale where GRADIENT.

    Maximum and sum come from one pass (Milakov and Gimelshein, arXiv:1805.02867), per place of a
    block first. The second pass runs backwards, because the end of a row is still in the cache.
    Grid: C tokens.
    """
    row = tl.program_id(0)
    target = tl.load(targets + row)
    x = logits + row.to(tl.int64) * words
    place = tl.arange(0, BLOCK)
    blocks = tl.cdiv(words, BLOCK)
    if target < 0:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for block in range(blocks):
                at = block * BLOCK + place
                tl.store(x + at, tl.zeros((BLOCK,), x.dtype.element_ty), mask=at < words)
    else:
        # finite, so that a place without logits adds nothing
        m_i = tl.full((BLOCK,), -1e38, tl.float32)
        acc = tl.zeros((BLOCK,), tl.float32)
        for block in range(blocks):
            at = block * BLOCK + place
            value = tl.load(x + at, mask=at < words, other=float("-inf")).to(tl.float32)
            m_new = tl.maximum(m_i, value)
            acc = acc * tl.exp(m_i - m_new) + tl.exp(value - m_new)
            m_i = m_new
        m = tl.max(m_i, 0)
        total = tl.sum(acc * tl.exp(m_i - m), 0)
        chosen = tl.load(x + target, mask=target < words, other=float("nan")).to(tl.float32)
        tl.store(losses + row, tl.log(total) + m - chosen)
        if GRADIENT:
            factor = scale / total
            for back in range(blocks):
                at = (blocks - 1 - back) * BLOCK + place
                value = tl.load(x + at, mask=at < words, other=0.0).to(tl.float32)
                gradient = tl.exp(value - m) * factor - tl.where(at == target, scale, 0.0)
                tl.store(x + at, gradient.to(x.dtype.element_ty), mask=at < words)
