"""Launches of the kernels for LoRA's adapters: fp32 split into parts of bfloat16, sums of such
parts, and the gradients of h and B of all layers that read the same tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hf_packfree.ops.backend import block_width
from hf_packfree.ops.fused.reduce import sum_partials
from hf_packfree.ops.launch import launch

# elements of a program
_BLOCK = 1024
# fewest outputs of a tile of `gradients_at_once`, and its programs
_NARROWEST = 16
_PROGRAMS = 264
# most layers of one launch
_LAYERS = 4
TILE_RANK = 16
"""The highest rank for `gradients_at_once`: with a higher one, writing and reading the partial sums
costs more than reading d_out twice.
"""


# tiles for adapters in half precision, and for fp32 adapters, which take more shared memory
_TILE = {"PARTS": 1, "PAIRS": 1, "ROWS": 32, "OUTPUTS": 512, "num_warps": 8, "num_stages": 3}
_SPLIT_TILE = {"PARTS": 4, "PAIRS": 2, "ROWS": 64, "OUTPUTS": 128, "num_warps": 4, "num_stages": 3}


def split_fp32(ws: Sequence[Tensor], width: int, *, paired: bool = False) -> Tensor:
    """Return fp32 tensors, one below the other, as three bfloat16 parts that add up to them to
    2^-24: [all elements / width, 3, width].

    `paired`: [W1, W2, W1], the factor for [h1, h1, h2] (README).
    """
    from hf_packfree.ops.fused.kernels.lora import split

    if len(ws) > _LAYERS:
        some = (ws[first : first + _LAYERS] for first in range(0, len(ws), _LAYERS))
        return torch.cat([split_fp32(each, width, paired=paired) for each in some])
    ws = [w.contiguous() for w in ws]
    counts = [w.numel() for w in ws]
    parts = ws[0].new_empty(sum(counts) // width, 3, width, dtype=torch.bfloat16)
    grid = -(-max(counts) // _BLOCK), len(ws)
    options = {"PAIRED": paired, "BLOCK": _BLOCK, "num_warps": 4}
    launch(split, grid, *_filled(ws, ws[0]), parts, *_filled(counts, 0), width, **options)
    return parts


def _filled(values: Sequence[Any], value: Any) -> list[Any]:
    """Return the arguments of a launch for `_LAYERS` layers, with `value` for missing layers."""
    return [*values, *[value] * (_LAYERS - len(values))]


def add_parts(wide: Tensor, out: Tensor, rank: int, scaling: float) -> Tensor:
    """Write [h1, h1, h2] (README) of h = scaling times the sum of each adapter's three parts in
    `wide`, fp32 [T, n 3 r], to `out` [T, n 3 r] and return it.
    """
    from hf_packfree.ops.fused.kernels.lora import add_parts

    count, columns = wide.numel() // 3, wide.shape[1] // 3
    sizes = count, rank, columns, out.stride(0), float(scaling)
    grid = (-(-count // _BLOCK),)
    launch(add_parts, grid, wide.contiguous(), out, *sizes, BLOCK=_BLOCK, num_warps=4)
    return out


def gradients_at_once(
    d_outs: Sequence[Tensor],
    Bs: Sequence[Tensor],
    h: Tensor,
    d_h: Tensor,
    scaling: float,
    *,
    split: bool,
) -> list[Tensor]:
    """Return the gradient d_out^T h of each layer's B, in B's dtype, and write scaling d_out B of
    all layers into `d_h`; each d_out is read once.

    Args:
        d_outs: [T, F] each, half precision.
        Bs: [F, r] each, in d_out's dtype, or fp32.
        h, d_h: [T, n r] of the n layers, or [T, n 3 r] where `split`.
        split: whether B, in fp32, is split into three parts, see `SplitFp32`; otherwise it is
            rounded.
    """
    from hf_packfree.ops.fused.kernels.lora import add_blocks, lora_gradients

    columns, found = h.shape[1] // len(Bs), list[Tensor]()
    if len(Bs) > _LAYERS:
        for first in range(0, len(Bs), _LAYERS):
            some = slice(first, first + _LAYERS)
            mine = slice(first * columns, (first + _LAYERS) * columns)
            parts = d_outs[some], Bs[some], h[:, mine], d_h[:, mine]
            found += gradients_at_once(*parts, scaling, split=split)
        return found
    d_outs = [d if d.stride(1) == 1 else d.contiguous() for d in d_outs]
    Bs = [B.contiguous() for B in Bs]
    (tokens, _), rank = d_outs[0].shape, Bs[0].shape[1]
    outputs, strides = [d.shape[1] for d in d_outs], [d.stride(0) for d in d_outs]
    tile = _SPLIT_TILE if split else _TILE
    rows, height = tile["ROWS"], min(block_width(max(*outputs, _NARROWEST)), tile["OUTPUTS"])
    ends = [*accumulate(-(-size // height) for size in outputs)]
    blocks = ends[-1]
    # one wave of programs per layer: a single wave of few large blocks would leave multiprocessors
    # idle
    steps = max(1, -(-tokens // (rows * max(1, _PROGRAMS * len(Bs) // blocks))))
    programs = -(-tokens // (rows * steps))
    d_hs = d_h.new_empty(blocks, tokens, rank, dtype=torch.float32)
    d_Bs = d_h.new_empty(programs, sum(outputs), rank, dtype=torch.float32)
    read = *_filled(d_outs, d_outs[0]), *_filled(Bs, Bs[0]), h[:, rank:] if split else h
    sizes = tokens, *_filled(outputs, 0), *_filled(strides, 0), rank, columns, h.stride(0), steps
    options = {**tile, "OUTPUTS": height, "RANK": TILE_RANK}
    launch(lora_gradients, (blocks, programs), *read, d_hs, d_Bs, *sizes, **options)
    sums = tokens, rank, *_filled(ends, blocks), d_h.stride(0), float(scaling)
    grid = -(-tokens * rank // _BLOCK), len(Bs)
    launch(add_blocks, grid, d_hs, d_h, *sums, PAIRED=split, BLOCK=_BLOCK, num_warps=4)
    return [*torch.split_with_sizes(sum_partials(d_Bs, Bs[0].dtype), outputs)]
