"""The gated delta rule over packed documents in plain torch: chunked, exact at boundaries, light on memory.

Nothing but the inputs is saved for the backward pass, which computes the forward's intermediates again, one block of
heads at a time.  Every product is a batched one over (chunk, head), which gives each chunk the same bits whatever else
is in the batch: a document's output does not depend on the row it is packed in.

Shapes: T tokens, H key heads, HV value heads, K and V head sizes, M chunks, C tokens of a chunk; h heads of a block,
R = M x h rows.  Formulas: see `chunks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hf_packfree.ops.delta_rule.chunks import Gates, Keys, make_gates, make_keys, make_system
from hf_packfree.ops.delta_rule.layout import ChunkLayout, plan_chunks
from hf_packfree.ops.delta_rule.scan import Flow, rows_of, scan_gradients, scan_outputs
from hf_packfree.packing import PackedSequence

CHUNK = 64
_WIDTH = 16  # what head sizes are multiples of
_HEADS_ON_CPU = 4  # key heads at once, so that the states of a time step stay in the cache


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, packed: PackedSequence) -> Tensor:
    """See `hf_packfree.ops.delta_rule.gated_delta_rule`."""
    layout, key_size, value_size = packed.derive(plan_chunks, CHUNK), q.shape[-1], v.shape[-1]
    q, k, v = _widen(q), _widen(k), _widen(v)
    out: Tensor = _GatedDeltaRule.apply(q, k, v, g, beta, key_size, layout)  # type: ignore[no-untyped-call]
    return out if out.shape[-1] == value_size else out[..., :value_size]


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, size: int, layout: ChunkLayout
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, g, beta)
        ctx.size, ctx.layout = size, layout
        return _forward(q[0], k[0], v[0], g[0], beta[0], size, layout)[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta = (x[0] for x in ctx.saved_tensors)
        gradients = _backward(q, k, v, g, beta, d_out[0], ctx.size, ctx.layout)
        return *(x[None] for x in gradients), None, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, size: int, layout: ChunkLayout
) -> Tensor:
    dtype = _compute_dtype(q)
    g_laid, beta_laid = (layout.take(x.to(dtype)) for x in (g, beta))
    outputs = v.new_empty(layout.num_chunks, layout.chunk, *v.shape[1:])
    for heads in _blocks(q):
        keys = make_keys(q[:, heads], k[:, heads], size, layout, dtype)
        steps = list(rows_of(layout, heads.stop - heads.start))
        for lane in _lanes(heads, q, v):
            values = layout.take(v[:, lane]).to(dtype)
            gates = make_gates(_rows(g_laid[..., lane]), _rows(beta_laid[..., lane]))
            system = make_system(keys, gates, values)
            found = torch.empty_like(system.values)
            scan_outputs(keys, gates, system, steps, found)
            outputs[:, :, lane] = _by_chunk(found, values)
    return layout.put_back(outputs)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, d_out: Tensor, size: int, layout: ChunkLayout
) -> tuple[Tensor, ...]:
    dtype = _compute_dtype(q)
    g_laid, beta_laid = (layout.take(x.to(dtype)) for x in (g, beta))
    d_q, d_k, d_v, d_g, d_beta = (x.new_empty(*g_laid.shape[:2], *x.shape[1:]) for x in (q, k, v, g, beta))
    for heads in _blocks(q):
        keys = make_keys(q[:, heads], k[:, heads], size, layout, dtype)
        steps = list(rows_of(layout, heads.stop - heads.start))
        d_units, d_products = torch.zeros_like(keys.units), torch.zeros_like(keys.products)
        for lane in _lanes(heads, q, v):
            values = layout.take(v[:, lane]).to(dtype)
            gates = make_gates(_rows(g_laid[..., lane]), _rows(beta_laid[..., lane]))
            system = make_system(keys, gates, values)
            d_found = _rows(layout.take_gradient(d_out[:, lane]).to(dtype))
            signals = torch.cat((torch.empty_like(d_found), d_found), 1)
            new, flow = scan_gradients(keys, gates, system, steps, signals, d_units)
            d_gate, d_strength = _local_gradients(keys, gates, new, flow, d_products)
            solved = signals[:, : layout.chunk]
            d_strength += (_rows(values) * solved).sum(-1)
            d_v[:, :, lane] = _by_chunk(solved * gates.beta, values)
            d_g[:, :, lane] = _by_chunk(d_gate, values)
            d_beta[:, :, lane] = _by_chunk(d_strength, values)
        d_keys, d_queries = _norm_gradients(keys, d_units, d_products, size)
        d_k[:, :, heads] = _by_chunk(d_keys, d_k[:, :, heads])
        d_q[:, :, heads] = _by_chunk(d_queries, d_q[:, :, heads])
    return tuple(layout.put_back(x) for x in (d_q, d_k, d_v, d_g, d_beta))


def _local_gradients(keys: Keys, gates: Gates, new: Tensor, flow: Flow, d_products: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of g and beta [R, C] but for beta's through beta v; add to that of `keys.products`.

    With Z = X^T dN: dL = -beta Z N^T and dP = dO N^T.  G_i gets what row i of dL L + dP P sums to, less column i.
    """
    chunk = new.shape[1]
    weights = torch.cat((-gates.beta, torch.ones_like(gates.beta)), 1)
    d_pairs = torch.bmm(flow.signals, new.mT).mul_(gates.pairs.flatten(1, 2))
    local = d_pairs * keys.products
    local[:, chunk:].diagonal(dim1=1, dim2=2).zero_()  # exp(G_i - G_i): its two parts cancel, but not their rounding
    row = local.sum(-1)
    d_products += d_pairs.mul_(weights)
    by_row = (row * weights[..., 0] + flow.reads * gates.reading[..., 0]).unflatten(1, (2, chunk))
    d_total = by_row[:, 0] + by_row[:, 1] - torch.bmm(weights.mT, local)[:, 0] - flow.writes
    d_total[:, -1] += flow.carry
    d_gate = d_total.flip(-1).cumsum(-1).flip(-1)
    d_beta = -row[:, :chunk] - gates.reading[:, chunk:, 0] * flow.reads[:, :chunk]
    return d_gate, d_beta


def _norm_gradients(keys: Keys, d_units: Tensor, d_products: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of the raw keys and queries [R, C, K]: n (dx - x (x.dx) / scale^2) for x = n raw."""
    chunk = d_products.shape[-1]
    d_units.baddbmm_(d_products, keys.units[:, :chunk])
    d_units[:, :chunk] += torch.bmm(d_products.mT, keys.units)
    along = (d_units * keys.units).sum(-1, keepdim=True)
    along[:, chunk:] *= size
    d_raw = d_units.sub_(keys.units * along).mul_(keys.norms)
    return d_raw[:, :chunk], d_raw[:, chunk:]


def _widen(x: Tensor) -> Tensor:
    """Append zeros up to a head size of whole cache lines: on odd ones, matrix products depend on the address."""
    return x if x.shape[-1] % _WIDTH == 0 else F.pad(x, (0, -x.shape[-1] % _WIDTH))


def _blocks(q: Tensor) -> Iterator[slice]:
    """Yield the key heads [T, H, K] in blocks."""
    heads = q.shape[1]
    size = min(heads, _HEADS_ON_CPU) if q.device.type == "cpu" else heads
    for first in range(0, heads, size):
        yield slice(first, min(first + size, heads))


def _lanes(heads: slice, q: Tensor, v: Tensor) -> Iterator[slice]:
    """Yield, for a block of key heads, the first value head that each serves, then the second, and so on."""
    groups = v.shape[1] // q.shape[1]
    for lane in range(groups):
        yield slice(heads.start * groups + lane, (heads.stop - 1) * groups + lane + 1, groups)


def _rows(x: Tensor) -> Tensor:
    """[M, C, h, ...] -> [R, C, ...]."""
    return x.transpose(1, 2).flatten(0, 1)


def _by_chunk(rows: Tensor, like: Tensor) -> Tensor:
    """[R, C, ...] -> [M, C, h, ...], h as in `like`."""
    return rows.view(-1, like.shape[2], *rows.shape[1:]).transpose(1, 2)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
