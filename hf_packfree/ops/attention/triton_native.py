"""Attention within documents on our Triton kernels, made for Hopper, where torch's own still run Ampere's instructions.

Launch sizes are fixed: nothing is tuned at run time, and a document's bits, gradients included, do not depend on its row.

Shapes: T tokens of the row, N documents, B blocks, H query heads, HK key heads, D head size.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_packfree.errors import BackendUnavailable
from hf_packfree.ops.backend import Site, needs_half, needs_triton, refuse_wide
from hf_packfree.ops.launch import launch
from hf_packfree.ops.operation import Operation
from hf_packfree.packing import PackedSequence, chunk_plan, uncompiled

_HOPPER = (9, 0)
_SIZES = (64, 128, 256)
_BLOCK = 128  # tokens of a program: queries, or keys whose gradients are summed
_MET = {"forward": 64, "queries": 32, "pairs": 32}  # tokens that it meets at a time
_STAGES = {"forward": 2, "queries": 3, "pairs": 1, "keys": 3, "values": 3}  # tiles of them that shared memory holds
_WARPS = 8


def unusable(site: Site) -> str | None:
    """Return why these kernels cannot run at `site`, or None."""
    if (reason := needs_triton(site)) is not None:
        return reason
    if site.capability is not None and site.capability != _HOPPER:
        return f"its blocks are made for Hopper (9.0), this is {site.gpu}"
    if (reason := needs_half(site)) is not None:
        return reason
    if (size := site.sizes.get("head_size", _SIZES[0])) not in _SIZES:
        return f"it takes heads of {', '.join(map(str, _SIZES))} channels; the model has {size}"
    return None


@uncompiled
def attend(q: Tensor, k: Tensor, v: Tensor, packed: PackedSequence, *, scale: float | None = None) -> Tensor:
    """See `hf_packfree.ops.attention.attention`."""
    if q.is_cuda:  # Triton's interpreter takes any
        refuse_wide("attention", "Triton", q, k, v)
    q, k, v = (x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous() for x in (q, k, v))
    if reach(q, k, v, packed.max_seqlen) > 2**31:
        raise BackendUnavailable(
            f"found a document of {packed.max_seqlen} tokens, more than the Triton kernels can count in 32 bits; wanted "
            "shorter documents; call apply_patches(model, backend={'attention': 'varlen'})"
        )
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return _Attention.apply(q, k, v, packed, scale)  # type: ignore[no-any-return]


def reach(q: Tensor, k: Tensor, v: Tensor, longest: int) -> int:
    """Return how many elements a document of `longest` tokens spans in the widest tensor; the output lies densely."""
    widest = max(q.shape[2] * q.shape[3], *(x.stride(1) for x in (q, k, v)))
    return (longest - 1) * widest + q.shape[3]


def plan_blocks(packed: PackedSequence, meets_what_follows: bool) -> Tensor:
    """Return int32 [B, 3] on the model's device: each block's document's start, its own start in it, and its length.

    The blocks with most to do come first, so that the last ones to end are short: queries meet what lies before them,
    keys what follows.
    """
    starts = packed.cu_seqlens_cpu.numpy()
    lengths = np.diff(starts)
    _, document, number = chunk_plan(packed, _BLOCK)
    start = number * _BLOCK
    work = lengths[document] - start if meets_what_follows else start
    blocks = np.stack((starts[document], start, lengths[document]), 1)[np.argsort(-work, kind="stable")]
    return torch.from_numpy(blocks).to(packed.cu_seqlens.device, non_blocking=True)


class _Attention(Operation):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, packed: PackedSequence, scale: float) -> Tensor:
        from hf_packfree.ops.attention.triton_kernels import attend

        out = q.new_empty(q.shape)
        lse = q.new_empty(q.shape[2], q.shape[1], dtype=torch.float32)
        blocks, heads = packed.cached(plan_blocks, False), _heads(q, k)
        sizes = q.shape[1], *(x.stride(1) for x in (q, k, v)), scale * math.log2(math.e)
        launch(attend, (blocks.shape[0], q.shape[2]), q, k, v, blocks, out, lse, *sizes, **heads, **_blocks("forward"))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packed, ctx.scale = packed, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        from hf_packfree.ops.attention import triton_kernels as kernels

        q, k, v, out, lse = ctx.saved_tensors
        d_out, delta, heads = d_out.contiguous(), torch.empty_like(lse), _heads(q, k)
        d_q, d_k, d_v = (x.new_empty(x.shape) for x in (q, k, v))
        before, after = (ctx.packed.cached(plan_blocks, follows) for follows in (False, True))
        tokens, strides, scale = q.shape[1], [x.stride(1) for x in (q, k, v)], ctx.scale * math.log2(math.e)
        launch(  # makes delta, so it comes first
            kernels.attend_backward_queries, (before.shape[0], q.shape[2]), q, k, v, before, out, d_out, lse, delta, d_q,
            tokens, *strides, scale, ctx.scale, **heads, **_blocks("queries"),
        )
        launch(
            kernels.attend_backward_pairs, (after.shape[0], k.shape[2], 2), q, k, v, after, d_out, lse, delta, d_k, d_v,
            tokens, *strides, scale, ctx.scale, **heads, **_blocks("pairs"),
            KEY_STAGES=_STAGES["keys"], VALUE_STAGES=_STAGES["values"],
        )
        return d_q, d_k, d_v, None, None


def _heads(q: Tensor, k: Tensor) -> dict[str, int]:
    """What a program is compiled for."""
    heads = q.shape[2]
    return {"HEADS": heads, "GROUP": heads // k.shape[2], "D": q.shape[3]}


def _blocks(kernel: str) -> dict[str, int]:
    """Its blocks, of queries where those are a program's, of keys where they are."""
    rows, columns = (_BLOCK, _MET[kernel]) if kernel in ("forward", "queries") else (_MET[kernel], _BLOCK)
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": _WARPS, "num_stages": _STAGES[kernel]}
