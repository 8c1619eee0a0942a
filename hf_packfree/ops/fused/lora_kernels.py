"""Launches of the kernels for LoRA's adapters: fp32 taken apart into parts of bfloat16, parts added
up, and both gradients that read a layer's d_out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_packfree.ops.backend import block_width
from hf_packfree.ops.fused.reduce import sum_partials
from hf_packfree.ops.launch import launch

# elements of a program
_BLOCK = 1024
# of `gradients_at_once`: outputs of a tile, at least
_NARROWEST = 16
_PROGRAMS = 264
TILE_RANK = 16
"""Of the tiles of `gradients_at_once`; with a higher rank the partial sums are more to write and
read than a second reading of d_out.
"""


# of adapters in half precision, and of those in fp32, which take more of the shared memory
_TILE = {"PARTS": 1, "PAIRS": 1, "ROWS": 32, "OUTPUTS": 512, "num_warps": 8, "num_stages": 3}
_SPLIT_TILE = {"PARTS": 4, "PAIRS": 2, "ROWS": 64, "OUTPUTS": 128, "num_warps": 4, "num_stages": 3}


def split_fp32(w: Tensor, width: int, *, paired: bool = False) -> Tensor:
    """Return w, in fp32, as three bfloat16 parts whose sum it is to 2^-24: [its elements / width,
    3, width].

    `paired`: [W1, W2, W1], the factor for [h1, h1, h2] (README).
    """
    from hf_packfree.ops.fused.kernels.lora import split

    w = w.contiguous()
    count = w.numel()
    parts = w.new_empty(count // width, 3, width, dtype=torch.bfloat16)
    options = {"PAIRED": paired, "BLOCK": _BLOCK, "num_warps": 4}
    launch(split, (-(-count // _BLOCK),), w, parts, count, width, **options)
    return parts


def add_parts(
    wide: Tensor,
    out: Tensor,
    size: tuple[int, int],
    rank: int,
    strides: Sequence[int],
    parts: int,
    scaling: float,
    *,
    paired: bool,
) -> Tensor:
    """Return `out`, which gets scaling times the sum of parts in `wide`, or [h1, h1, h2] of it
    where `paired`.

    Args:
        wide: fp32.
        size: (T, n r).
        strides: of a token, an adapter and a part in `wide`.
    """
    from hf_packfree.ops.fused.kernels.lora import add_parts

    count = size[0] * size[1]
    sizes = count, rank, size[1], *strides, parts, out.stride(0), float(scaling)
    options = {"PAIRED": paired, "BLOCK": _BLOCK, "num_warps": 4}
    launch(add_parts, (-(-count // _BLOCK),), wide, out, *sizes, **options)
    return out


def gradients_at_once(
    d_out: Tensor, B: Tensor, h: Tensor, d_h: Tensor, scaling: float, *, split: bool
) -> Tensor:
    """Return d_out^T h in B's dtype, and write scaling d_out B into `d_h`: d_out is read once.

    Args:
        d_out: [T, F], half precision.
        B: [F, r], in d_out's dtype, or fp32.
        h, d_h: [T, r], or [T, 3 r] where `split`.
        split: whether B, in fp32, is taken apart, see `SplitFp32`; otherwise it is rounded.
    """
    from hf_packfree.ops.fused.kernels.lora import lora_gradients

    (tokens, outputs), rank = d_out.shape, B.shape[1]
    d_out, B = d_out if d_out.stride(1) == 1 else d_out.contiguous(), B.contiguous()
    tile = _SPLIT_TILE if split else _TILE
    rows, height = tile["ROWS"], min(block_width(max(outputs, _NARROWEST)), tile["OUTPUTS"])
    blocks = -(-outputs // height)
    steps = max(1, -(-tokens // (rows * max(1, _PROGRAMS // blocks))))
    programs = -(-tokens // (rows * steps))
    d_hs = d_out.new_empty(blocks, tokens, rank, dtype=torch.float32)
    d_Bs = d_out.new_empty(programs, outputs, rank, dtype=torch.float32)
    h = h[:, rank:] if split else h
    sizes = tokens, outputs, rank, d_out.stride(0), h.stride(0), steps
    options = {**tile, "OUTPUTS": height, "RANK": TILE_RANK}
    launch(lora_gradients, (blocks, programs), d_out, B, h, d_hs, d_Bs, *sizes, **options)
    size, strides = (tokens, rank), (rank, rank, tokens * rank)
    add_parts(d_hs, d_h, size, rank, strides, blocks, scaling, paired=split)
    return sum_partials(d_Bs, B.dtype)
