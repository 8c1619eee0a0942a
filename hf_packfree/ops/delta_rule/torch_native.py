"""The gated delta rule over packed documents in plain torch: chunked, exact at boundaries, light on memory.

Nothing but the inputs is saved for the backward pass, which computes the forward's intermediates again, one block of
heads at a time.  Every product is a batched one over (chunk, head), which gives each chunk the same bits whatever else
is in the batch: a document's output does not depend on the row it is packed in.

Shapes: T tokens, H key heads, HV value heads, K and V head sizes.  Formulas: see `chunks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hf_packfree.ops.delta_rule.chunks import make_gates, make_keys, make_system
from hf_packfree.ops.delta_rule.gradients import KeyGradients, add_head, finish_keys
from hf_packfree.ops.delta_rule.layout import plan_windows
from hf_packfree.ops.delta_rule.rows import TokenReader, TokenWriter
from hf_packfree.ops.delta_rule.scan import scan_gradients, scan_outputs, scan_states
from hf_packfree.packing import PackedSequence

CHUNK = 64
_WIDTH = 16  # what head sizes are multiples of
_FORWARD_HEADS, _BACKWARD_HEADS = 8, 4  # key heads at once on the CPU: small enough for the cache, large for few calls
_FORWARD_ROWS = 128  # chunks x heads at once on the CPU


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, packed: PackedSequence) -> Tensor:
    """See `hf_packfree.ops.delta_rule.gated_delta_rule`."""
    sizes = q.shape[-1], v.shape[-1]
    q, k, v = _widen(q), _widen(k), _widen(v)
    out: Tensor = _GatedDeltaRule.apply(q, k, v, g, beta, sizes[0], packed)  # type: ignore[no-untyped-call]
    return out if out.shape[-1] == sizes[1] else out[..., : sizes[1]]


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, size: int, packed: PackedSequence
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, g, beta)
        ctx.size, ctx.packed = size, packed
        return _forward((q[0], k[0], v[0], g[0], beta[0]), size, packed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        inputs = tuple(x[0] for x in ctx.saved_tensors)
        return *_backward(inputs, d_out[0], ctx.size, ctx.packed), None, None


def _forward(inputs: tuple[Tensor, ...], size: int, packed: PackedSequence) -> Tensor:
    """Compute o [1, T, HV, V] from q, k, v, g, beta without their leading 1."""
    dtype = _compute_dtype(inputs[0])
    q, k, v, g, beta = (TokenReader(x) for x in inputs)
    out = TokenWriter(inputs[2])
    blocks = list(_blocks(inputs[0], inputs[2], _FORWARD_HEADS))
    limit = max(1, _FORWARD_ROWS // blocks[0][1]) if inputs[0].device.type == "cpu" else packed.num_tokens
    windows = packed.derive(plan_windows, CHUNK, limit)
    for heads, count, lanes in blocks:
        first = windows[0].steps[0].docs * count
        states = [out.whole.new_empty(first, q.table.shape[1], v.table.shape[1], dtype=dtype) for _ in lanes]
        for window in windows:
            keys = make_keys(q.read(heads, window, dtype), k.read(heads, window, dtype), size)
            for lane, state in zip(lanes, states, strict=True):
                gates = make_gates(*(x.read(lane, window, dtype)[..., 0] for x in (g, beta)))
                system = make_system(keys, gates, v.read(lane, window, dtype))
                out.write(scan_outputs(system, window.steps, count, state), lane, window)
    return out.result()


def _backward(inputs: tuple[Tensor, ...], d_out: Tensor, size: int, packed: PackedSequence) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, g, beta, each [1, ...], from d_out [T, HV, V]."""
    dtype = _compute_dtype(inputs[0])
    q, k, v, g, beta, d_o = (TokenReader(x) for x in (*inputs, d_out))
    d_q, d_k, d_v, d_g, d_beta = (TokenWriter(x) for x in inputs)
    (window,) = packed.derive(plan_windows, CHUNK, packed.num_tokens)
    for heads, count, lanes in _blocks(inputs[0], inputs[2], _BACKWARD_HEADS):
        keys = make_keys(q.read(heads, window, dtype), k.read(heads, window, dtype), size)
        total = KeyGradients(*(torch.zeros_like(x) for x in (keys.k, keys.q, keys.kk, keys.qk)))
        for lane in lanes:
            gates = make_gates(*(x.read(lane, window, dtype)[..., 0] for x in (g, beta)))
            system = make_system(keys, gates, v.read(lane, window, dtype))
            new, d_new = torch.empty_like(system.values), d_o.read(lane, window, dtype, zero_padding=True)
            states, kept = new.new_empty(len(new), keys.k.shape[-1], new.shape[-1]), new.new_empty(len(new))
            scan_states(system, window.steps, count, states, new)
            scan_gradients(system, window.steps, count, states, new, d_new, kept)
            raw = v.read(lane, window, dtype)
            found = add_head(keys, gates, system, new, d_new, kept, raw, total)
            for writer, rows in zip((d_v, d_g, d_beta), found, strict=True):
                writer.write(rows, lane, window)
        for writer, rows in zip((d_k, d_q), finish_keys(keys, total, size), strict=True):
            writer.write(rows, heads, window)
    return tuple(x.result() for x in (d_q, d_k, d_v, d_g, d_beta))


def _blocks(q: Tensor, v: Tensor, at_once: int) -> Iterator[tuple[slice, int, list[slice]]]:
    """Yield blocks of key heads, their count, and the value heads they serve: first, second, ... of each key head."""
    heads, groups = q.shape[1], v.shape[1] // q.shape[1]
    at_once = at_once if q.device.type == "cpu" else heads
    for first in range(0, heads, at_once):
        last = min(first + at_once, heads)
        lanes = [slice(first * groups + lane, (last - 1) * groups + lane + 1, groups) for lane in range(groups)]
        yield slice(first, last, 1), last - first, lanes


def _widen(x: Tensor) -> Tensor:
    """Append zeros up to a head size of whole cache lines: on odd ones, matrix products depend on the address."""
    return x if x.shape[-1] % _WIDTH == 0 else F.pad(x, (0, -x.shape[-1] % _WIDTH))


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
