"""The Triton kernel of dropout."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def drop_out(x, out, seed, number, count, probability, BLOCK: tl.constexpr):
    """out [count]: x, or zero times x with that probability, by Philox: its key is the seed plus
    number, its counter the program and lane, and each of its four numbers decides for one element.
    Grid: blocks of 4 BLOCK elements.
    """
    lane = tl.arange(0, BLOCK)
    key = tl.load(seed) + number
    r0, r1, r2, r3 = tl.rand4x(key, tl.program_id(0) * BLOCK + lane)
    place = tl.program_id(0).to(tl.int64) * (4 * BLOCK) + lane
    _drop(x, out, place, r0, count, probability)
    _drop(x, out, place + BLOCK, r1, count, probability)
    _drop(x, out, place + 2 * BLOCK, r2, count, probability)
    _drop(x, out, place + 3 * BLOCK, r3, count, probability)


@triton.jit
def _drop(x, out, place, random, count, probability):
    """Write one element of each lane; `random` is from 0, below 1."""
    inside = place < count
    value = tl.load(x + place, mask=inside, other=0.0)
    tl.store(out + place, tl.where(random >= probability, value, value * 0), mask=inside)
