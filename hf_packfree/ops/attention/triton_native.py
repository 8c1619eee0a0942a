"""Attention within documents on our Triton kernels, written for Hopper, where torch's own
FlashAttention still uses Ampere's instructions.

Launch sizes are fixed: nothing is tuned at run time, and a document's results are batch-invariant,
gradients included.

Shapes: T tokens of the row, N documents, B blocks, H query heads, HK key heads, D head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hf_packfree.errors import BackendUnavailable
from hf_packfree.once_differentiable import once_differentiable
from hf_packfree.ops.backend import Target, needs_half, needs_triton, refuse_wide
from hf_packfree.ops.launch import launch
from hf_packfree.packing import PackedSequence, chunk_plan, uncompiled

_HOPPER = (9, 0)
_SIZES = (64, 128, 256)
# tokens of a program: its queries, or in `attn_bwd_dkdv` its keys
_BLOCK = 128
# tokens of one step of a program's loop: keys, or in `attn_bwd_dkdv` queries
_INNER_BLOCK = {"fwd": 64, "bwd_dq": 32, "bwd_dkdv": 32}
# pipeline stages of that loop (Triton's num_stages), as shared memory allows
_STAGES = {"fwd": 2, "bwd_dq": 3, "bwd_dkdv": 1, "bwd_dk": 3, "bwd_dv": 3}
_WARPS = 8

# the kernels compute exp2
_LOG2_E = math.log2(math.e)


def unusable(target: Target) -> str | None:
    """Return why these kernels cannot run at `target`, or None."""
    if (reason := needs_triton(target)) is not None:
        return reason
    if target.capability is not None and target.capability != _HOPPER:
        return f"its blocks are sized for Hopper (9.0), this is {target.gpu}"
    if (reason := needs_half(target)) is not None:
        return reason
    if target.sizes.get("gathered_keys"):
        return "it takes as many keys as queries, and ranks that gather keys have more"
    if (size := target.sizes.get("head_size", _SIZES[0])) not in _SIZES:
        return f"it takes heads of {', '.join(map(str, _SIZES))} channels; the model has {size}"
    return None


@uncompiled
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedSequence,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `hf_packfree.ops.attention.attention`; every other `window` is compiled anew.

    Raises:
        BackendUnavailable: q, k and v are not in half precision, or a document overflows int32.
    """
    # on a CPU, in Triton's interpreter, any dtype runs
    if q.is_cuda:
        refuse_wide("Triton", q, k, v)
    q, k, v = (x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous() for x in (q, k, v))
    if reach(q, k, v, packed.max_seqlen) > 2**31:
        raise BackendUnavailable(
            f"found a document of {packed.max_seqlen} tokens, more than the Triton kernels can "
            "count in 32 bits; wanted "
            "shorter documents; call apply_patches(model, backend={'attention': 'varlen'})"
        )
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return _Attention.apply(q, k, v, sinks, packed, scale, window or 0)  # type: ignore[no-any-return]


def reach(q: Tensor, k: Tensor, v: Tensor, longest: int) -> int:
    """Return how many elements of memory a document of `longest` tokens spans in the widest of q,
    k, v and the output.
    """
    widest = max(q.shape[2] * q.shape[3], *(x.stride(1) for x in (q, k, v)))
    return (longest - 1) * widest + q.shape[3]


def plan_blocks(packed: PackedSequence, of_keys: bool) -> Tensor:
    """Return int32 [B, 4] on the model's device: for each block its document's first token in the
    row, the block's first token in the document, the document's length, and the first token of the
    document's first block of queries whose output is read, see `PackedSequence.unread`.

    The blocks with most work come first, so that the last ones to end are short: queries attend to
    the tokens before them, keys are attended to by the tokens after.
    """
    starts = packed.plan_offsets
    lengths = starts.diff()
    _, document, number = chunk_plan(packed, _BLOCK)
    unread = torch.zeros_like(lengths)
    if packed.unread:
        unread[: len(packed.unread)] = torch.tensor(packed.unread, dtype=torch.int32, device="cpu")
        if not of_keys:
            document, number = _read(packed, document, number, unread)
    start, first = number * _BLOCK, unread[document] // _BLOCK * _BLOCK
    work = lengths[document] - torch.maximum(start, first) if of_keys else start
    blocks = torch.stack((starts[document], start, lengths[document], first), 1)
    order = work.argsort(descending=True, stable=True)
    return blocks[order].to(packed.cu_seqlens.device, non_blocking=True)


def _read(
    packed: PackedSequence, document: Tensor, number: Tensor, unread: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the blocks without those whose outputs are unread; a bounded plan keeps its size, so
    there they become blocks of the last document, which is empty.
    """
    read = (number + 1) * _BLOCK > unread[document]
    if packed.bounded:
        return torch.where(read, document, len(unread) - 1), torch.where(read, number, 0)
    return document[read], number[read]


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        packed: PackedSequence,
        scale: float,
        window: int,
    ) -> Tensor:
        from hf_packfree.ops.attention.triton_kernels import attn_fwd

        out = q.new_empty(q.shape)
        lse = _empty(q, packed, sinks)
        blocks, heads = packed.cached(plan_blocks, False), _heads(q, k, window)
        scores = None if sinks is None else sinks.float() * _LOG2_E
        sizes = q.shape[1], *(x.stride(1) for x in (q, k, v)), scale * _LOG2_E
        launch(
            attn_fwd,
            (blocks.shape[0], q.shape[2]),
            q,
            k,
            v,
            blocks,
            scores,
            out,
            lse,
            *sizes,
            **heads,
            **_blocks("fwd"),
        )
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.packed, ctx.scale, ctx.window = packed, scale, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        from hf_packfree.ops.attention import triton_kernels_backward as kernels

        q, k, v, sinks, out, lse = ctx.saved_tensors
        d_out, delta = d_out.contiguous(), _empty(q, ctx.packed, sinks)
        heads = _heads(q, k, ctx.window)
        d_q, d_k, d_v = (x.new_empty(x.shape) for x in (q, k, v))
        query_blocks, key_blocks = (
            ctx.packed.cached(plan_blocks, of_keys) for of_keys in (False, True)
        )
        tokens, strides, scale = (
            q.shape[1],
            [x.stride(1) for x in (q, k, v)],
            ctx.scale * _LOG2_E,
        )
        # computes delta, so it comes first
        launch(
            kernels.attn_bwd_dq,
            (query_blocks.shape[0], q.shape[2]),
            q,
            k,
            v,
            query_blocks,
            out,
            d_out,
            lse,
            delta,
            d_q,
            tokens,
            *strides,
            scale,
            ctx.scale,
            **heads,
            **_blocks("bwd_dq"),
        )
        launch(
            kernels.attn_bwd_dkdv,
            (key_blocks.shape[0], k.shape[2], 2),
            q,
            k,
            v,
            key_blocks,
            d_out,
            lse,
            delta,
            d_k,
            d_v,
            tokens,
            *strides,
            scale,
            ctx.scale,
            **heads,
            **_blocks("bwd_dkdv"),
            KEY_STAGES=_STAGES["bwd_dk"],
            VALUE_STAGES=_STAGES["bwd_dv"],
        )
        d_sinks = _gradient_of_sinks(sinks, lse, delta) if ctx.needs_input_grad[3] else None
        return d_q, d_k, d_v, d_sinks, None, None, None


def _empty(q: Tensor, packed: PackedSequence, sinks: Tensor | None) -> Tensor:
    """Allocate fp32 [H, T] for lse or delta; zeros where blocks of unread queries are not written
    and the gradient of sinks sums over all queries.
    """
    new = q.new_zeros if sinks is not None and packed.unread else q.new_empty
    return new(q.shape[2], q.shape[1], dtype=torch.float32)


def _gradient_of_sinks(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return d_sinks [H]: a sink is a key of value zero, whose softmax weight is exp(sink -
    lse).
    """
    weights = torch.exp2(sinks.float()[:, None] * _LOG2_E - lse)
    return -(weights * delta).sum(1).to(sinks.dtype)


def _heads(q: Tensor, k: Tensor, window: int) -> dict[str, int]:
    """The `tl.constexpr` arguments that depend on q, k and the window."""
    heads = q.shape[2]
    return {"HEADS": heads, "GROUP": heads // k.shape[2], "D": q.shape[3], "WINDOW": window}


def _blocks(kernel: str) -> dict[str, int]:
    """A kernel's block sizes and launch options: BLOCK_M queries and BLOCK_N keys."""
    inner = _INNER_BLOCK[kernel]
    block_m, block_n = (inner, _BLOCK) if kernel == "bwd_dkdv" else (_BLOCK, inner)
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": _WARPS,
        "num_stages": _STAGES[kernel],
    }
