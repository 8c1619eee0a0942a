"""Decay factors between the tokens of a chunk, where the log decay is one number per token and
head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_packfree.ops.chunked.scratch import Scratch


class Decays(NamedTuple):
    """Decay factors of R rows of one chunk and head; G_i = g_0 + ... + g_i is the cumulative log
    decay.

    Attributes:
        decay: [R, C, 1], exp(G).
        rest: [R, C, 1], exp(G_C - G), the decay of a token's write until the end of the chunk.
        whole: [R, 1, 1], exp(G_C).
        pairs: [R, C, C], exp(G_i - G_j) for j <= i, else zero.
    """

    decay: Tensor
    rest: Tensor
    whole: Tensor
    pairs: Tensor


def make_decays(g: Tensor, space: Scratch, tag: str) -> Decays:
    """Exponentiate the log decays g [R, C, 1]; `tag` names the buffer.

    G_i - G_j is summed from the decays between the two tokens alone: subtracting cumulative sums
    would lose what little decay there is after a strong one.
    """
    rows, chunk, _ = g.shape
    lower = torch.ones(chunk, chunk, dtype=g.dtype, device=g.device).tril()
    steps = torch.mul(g.mT, lower, out=space("temporary", rows, chunk, chunk))
    between = torch.bmm(
        steps, lower.tril(-1).expand(rows, -1, -1), out=space(f"pairs{tag}", rows, chunk, chunk)
    )
    pairs = between.exp_().mul_(lower)
    decay = g.cumsum(1).exp_()
    return Decays(decay, pairs[:, -1, :, None].contiguous(), decay[:, -1:], pairs)
