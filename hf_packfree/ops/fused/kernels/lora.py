"""Triton kernels of LoRA's adapters: fp32 split into three numbers of half precision, the gradients
of h and B, which both read d_out, and sums of partial sums.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _parts(a, dtype: tl.constexpr):
    """Split fp32 numbers into a high, a middle and a low part in `dtype`, which add up to them."""
    high = a.to(dtype)
    rest = a - high.to(tl.float32)
    middle = rest.to(dtype)
    return high, middle, (rest - middle.to(tl.float32)).to(dtype)


@triton.jit
def _of_layer(number, first, second, third, fourth):
    """The argument of layer `number`, of up to four layers."""
    of_last = tl.where(number == 2, third, fourth)
    return tl.where(number == 0, first, tl.where(number == 1, second, of_last))


@triton.jit
def split(
    w0,
    w1,
    w2,
    w3,
    parts,
    count0,
    count1,
    count2,
    count3,
    width,
    PAIRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """parts [all counts / width, 3, width]: high, middle and low part of up to four w, one below
    the other; where PAIRED, high, middle and high. Grid: blocks of the largest, w.
    """
    number = tl.program_id(1)
    count = _of_layer(number, count0, count1, count2, count3)
    before = _of_layer(number, 0, count0, count0 + count1, count0 + count1 + count2)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    dtype = parts.dtype.element_ty
    w = _of_layer(number, w0, w1, w2, w3)
    high, middle, low = _parts(tl.load(w + i, mask=mask, other=0.0), dtype)
    part = parts + 3 * before + (i // width) * 3 * width + i % width
    tl.store(part, high, mask=mask)
    tl.store(part + width, middle, mask=mask)
    tl.store(part + 2 * width, high if PAIRED else low, mask=mask)


@triton.jit(do_not_specialize=["tokens", "steps"])
def lora_gradients(
    d_out0,
    d_out1,
    d_out2,
    d_out3,
    B0,
    B1,
    B2,
    B3,
    h,
    d_h,
    d_B,
    tokens,
    outputs0,
    outputs1,
    outputs2,
    outputs3,
    stride0,
    stride1,
    stride2,
    stride3,
    rank,
    h_columns,
    h_stride,
    steps,
    PARTS: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RANK: tl.constexpr,
):
    """Per block of a layer's outputs d_h [blocks, T, r] = d_out B, per program d_B
    [programs, all F, r] = d_out^T h, in fp32.

    Up to four layers; missing ones have 0 outputs. d_out [T, F], rows `stride` apart, is read once.
    B [F, r] is multiplied whole, or where PARTS is 4 as its three parts and a zero one; h [T, r] of
    a layer, `h_columns` from the next layer's, whole, or as the sum of PAIRS neighbours [T, 2, r].
    Grid: blocks of OUTPUTS of all layers, programs of `steps` blocks of ROWS.
    """
    block, program = tl.program_id(0), tl.program_id(1)
    end0 = tl.cdiv(outputs0, OUTPUTS)
    end1 = end0 + tl.cdiv(outputs1, OUTPUTS)
    end2 = end1 + tl.cdiv(outputs2, OUTPUTS)
    layer = (block >= end0).to(tl.int32) + (block >= end1).to(tl.int32)
    layer += (block >= end2).to(tl.int32)
    d_out, B = _of_layer(layer, d_out0, d_out1, d_out2, d_out3), _of_layer(layer, B0, B1, B2, B3)
    outputs = _of_layer(layer, outputs0, outputs1, outputs2, outputs3)
    d_out_stride = _of_layer(layer, stride0, stride1, stride2, stride3)
    output = (block - _of_layer(layer, 0, end0, end1, end2)) * OUTPUTS + tl.arange(0, OUTPUTS)
    before = _of_layer(layer, 0, outputs0, outputs0 + outputs1, outputs0 + outputs1 + outputs2)
    dtype = d_out.dtype.element_ty
    j = tl.arange(0, RANK)[None, :]
    column, pair = tl.arange(0, PARTS * RANK)[None, :], tl.arange(0, PAIRS * RANK)[None, :]
    factor = tl.load(
        B + output[:, None] * rank + column % RANK,
        mask=(output[:, None] < outputs) & (column % RANK < rank),
        other=0.0,
    )
    if PARTS == 1:
        factor = factor.to(dtype)
    else:
        high, middle, low = _parts(factor, dtype)
        part = column // RANK
        factor = tl.where(
            part == 0,
            high,
            tl.where(part == 1, middle, tl.where(part == 2, low, tl.zeros_like(low))),
        )
    row = program.to(tl.int64) * steps * ROWS + tl.arange(0, ROWS)[:, None]
    g_tile = d_out + row * d_out_stride + output[None, :]
    h_tile = h + row * h_stride + layer * h_columns + pair // RANK * rank + pair % RANK
    sums = d_h + (block.to(tl.int64) * tokens + row) * rank + j
    acc = tl.zeros([OUTPUTS, PAIRS * RANK], dtype=tl.float32)
    for _ in range(steps):
        g = tl.load(g_tile, mask=(row < tokens) & (output[None, :] < outputs), other=0.0)
        read = tl.load(h_tile, mask=(row < tokens) & (pair % RANK < rank), other=0.0)
        wide = tl.dot(g, factor)
        if PARTS > 1:
            wide = tl.sum(tl.reshape(wide, [ROWS, PARTS, RANK]), 1)
        tl.store(sums, wide, mask=(row < tokens) & (j < rank))
        acc = tl.dot(tl.trans(g), read, acc)
        row += ROWS
        g_tile += ROWS * d_out_stride
        h_tile += ROWS * h_stride
        sums += ROWS * rank
    if PAIRS > 1:
        acc = tl.sum(tl.reshape(acc, [OUTPUTS, PAIRS, RANK]), 1)
    every = outputs0 + outputs1 + outputs2 + outputs3
    place = d_B + (program.to(tl.int64) * every + before + output[:, None]) * rank + j
    tl.store(place, acc, mask=(output[:, None] < outputs) & (j < rank))


@triton.jit(do_not_specialize=["tokens", "end0", "end1", "end2", "end3"])
def add_blocks(
    wide,
    out,
    tokens,
    rank,
    end0,
    end1,
    end2,
    end3,
    out_stride,
    scale,
    PAIRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [T, n r] = scale times the sum of each layer's blocks in wide [blocks, T, r], which end
    before `end`; where PAIRED, [T, n 3 r], that sum split as [h1, h1, h2].

    out_stride: how many elements a token of `out` is from the next. Grid: blocks of a layer's sums,
    layers.
    """
    layer = tl.program_id(1)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = tokens.to(tl.int64) * rank
    mask = i < size
    begin = _of_layer(layer, 0, end0, end1, end2)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    place = wide + begin * size + i
    for _ in range(begin, _of_layer(layer, end0, end1, end2, end3)):
        total += tl.load(place, mask=mask, other=0.0)
        place += size
    _store_sums(out, total * scale, i // rank, layer, i % rank, rank, out_stride, mask, PAIRED)


@triton.jit
def _store_sums(out, total, token, number, j, rank, out_stride, mask, PAIRED: tl.constexpr):
    """Store sums of an adapter's columns j, as [h1, h1, h2] where PAIRED."""
    dtype = out.dtype.element_ty
    high = total.to(dtype)
    if PAIRED:
        pair = out + token * out_stride + number * 3 * rank + j
        tl.store(pair, high, mask=mask)
        tl.store(pair + rank, high, mask=mask)
        tl.store(pair + 2 * rank, (total - high.to(tl.float32)).to(dtype), mask=mask)
    else:
        tl.store(out + token * out_stride + number * rank + j, high, mask=mask)


@triton.jit(do_not_specialize=["count"])
def add_parts(wide, out, count, rank, columns, out_stride, scale, BLOCK: tl.constexpr):
    """out [T, n 3 r] = [h1, h1, h2] of scale times the sum of the three parts in wide [T, n, 3, r].

    columns: n r. out_stride: how many elements a token of `out` is from the next. Grid: blocks of
    the sums.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    token, column = i // columns, i % columns
    number, j = column // rank, column % rank
    place = wide + i // rank * 3 * rank + j
    total = tl.load(place, mask=mask, other=0.0) + tl.load(place + rank, mask=mask, other=0.0)
    total += tl.load(place + 2 * rank, mask=mask, other=0.0)
    _store_sums(out, total * scale, token, number, j, rank, out_stride, mask, True)
