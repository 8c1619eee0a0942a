"""`segments.Scans`, by which segments are walked in parallel, on the kernels that FlashQLA uses for
its own cutting (`auto_cp`).

FlashQLA's own summaries leave out chunks whose decay falls below e^-10, and round states to half
precision; ours cover every chunk, in fp32.

Shapes: T tokens, S segments, H key heads, HV value heads, K and V head sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_packfree.ops.backend import on_hopper
from hf_packfree.ops.delta_rule import flash_qla
from hf_packfree.ops.delta_rule.even_segments import segments_of
from hf_packfree.ops.delta_rule.flash_qla import planned_cu_seqlens
from hf_packfree.ops.delta_rule.reference import rounded_l2norm
from hf_packfree.ops.delta_rule.segments import Segments, walk_segments
from hf_packfree.ops.fla_support import CHUNK
from hf_packfree.packing import PackedSequence, uncompiled
from hf_packfree.packing.marks import FLASH_QLA_PLAN

Saved = tuple[Tensor, ...]


class FlashQLAScans:
    """See `hf_packfree.ops.delta_rule.segments.Scans`."""

    def prepare(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, segments: Segments
    ) -> Saved:
        """Return q, k, v, the decays summed within chunks, beta, and the chunks' triangular
        systems, solved.
        """
        from flash_qla.ops.gated_delta_rule.chunk import chunk_local_cumsum, kkt_solve

        q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g.float(), beta))
        offsets = segments.record.cached(planned_cu_seqlens)
        sums = chunk_local_cumsum(g, cu_seqlens=offsets, chunk_size=CHUNK)
        return q, k, v, sums, beta, kkt_solve(k, beta, cu_seqlens=offsets, chunk_size=CHUNK)

    def summarize(self, saved: Saved, segments: Segments) -> tuple[Tensor, Tensor]:
        """Scan every segment that another segment of its document follows, from zero states and
        from the identity.
        """
        from flash_qla.ops.gated_delta_rule.chunk.hopper.prepare_h import tilelang_prepare_h

        _, k, v, sums, beta, solved = saved
        offsets = segments.record.cached(planned_cu_seqlens)
        plan: Any = FLASH_QLA_PLAN.of(offsets)
        _, firsts, *_ = plan
        count, (heads, size) = segments.record.num_segments, v.shape[2:]
        # apart, since the backward pass keeps the transitions alone
        transition, state, unused = (
            v.new_empty(count, heads, size, size, dtype=torch.float32) for _ in range(3)
        )
        scan = tilelang_prepare_h(
            heads,
            k.shape[2],
            size,
            size,
            CHUNK,
            accum_dtype="float32",
            qkva_dtype=k.dtype,
            g_dtype=sums.dtype,
            b_dtype=beta.dtype,
            h0_dtype=unused.dtype,
            ht_dtype=state.dtype,
            h_dtype=k.dtype,
            seqlen_dtype=offsets.dtype,
            use_initial_state=False,
            store_final_state=True,
            store_h=False,
            is_varlen=True,
            is_cp=True,
            state_v_first=False,
        )
        chunks, states = segments.scanned(heads), k.new_empty(1, 0, heads, size, size)
        scan(k, v, solved, sums, beta, unused, offsets, firsts, chunks, states, state, transition)
        return transition, state

    def walk(self, saved: Saved, initial_state: Tensor, segments: Segments) -> Tensor:
        """Run the forward kernel."""
        from flash_qla.ops.gated_delta_rule.chunk import fused_gdr_fwd

        q, k, v, sums, beta, solved = saved
        offsets = segments.record.cached(planned_cu_seqlens)
        out: Tensor = fused_gdr_fwd(
            q,
            k,
            v,
            solved,
            sums,
            beta,
            initial_state=initial_state,
            output_final_state=False,
            cu_seqlens=offsets,
            raw_cu_seqlens=offsets,
        )[0]
        return out

    def summarize_gradient(self, saved: Saved, d_out: Tensor, segments: Segments) -> Tensor:
        """Scan every segment that follows another of its document, backwards, from zero gradients
        of its final state.
        """
        from flash_qla.ops.gated_delta_rule.chunk import fused_gdr_dh

        q, k, v, sums, beta, solved = saved
        _, d_before = fused_gdr_dh(
            q,
            k,
            solved,
            sums,
            beta,
            d_out,
            output_dh=False,
            cu_seqlens=segments.record.cached(planned_cu_seqlens),
            num_warmup_chunks=segments.scanned(v.shape[2], reverse=True),
        )
        return d_before  # type: ignore[no-any-return]

    def walk_back(
        self,
        saved: Saved,
        initial_state: Tensor,
        d_out: Tensor,
        d_final: Tensor,
        segments: Segments,
    ) -> tuple[Tensor, ...]:
        """Run the backward kernels."""
        from flash_qla import chunk_gated_delta_rule_bwd

        q, k, v, _, beta, _ = saved
        d_q, d_k, d_v, d_beta, d_g, d_initial = chunk_gated_delta_rule_bwd(
            *saved,
            d_out,
            dht=d_final,
            initial_state=initial_state,
            auto_cp=False,
            cu_seqlens=segments.record.cached(planned_cu_seqlens),
            scale=k.shape[-1] ** -0.5,
        )
        return (
            d_q.to(q.dtype),
            d_k.to(k.dtype),
            d_v.to(v.dtype),
            d_g,
            d_beta.to(beta.dtype),
            d_initial,
        )


@uncompiled
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    packed: PackedSequence,
    qk_l2norm: bool,
) -> Tensor:
    """See `hf_packfree.ops.delta_rule.gated_delta_rule`."""
    segments = segments_of(packed, parallel_segments(q, v.shape[2])) if cuts_on(q.device) else None
    if segments is None:
        return flash_qla.gated_delta_rule(q, k, v, g, beta, packed, qk_l2norm)
    return in_segments(q, k, v, g, beta, segments, qk_l2norm)


def in_segments(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, segments: Segments, qk_l2norm: bool
) -> Tensor:
    """Run the gated delta rule on documents cut into these segments."""
    if qk_l2norm:
        q, k = map(rounded_l2norm, (q, k))
    # TileLang launches on the current device
    with torch.cuda.device_of(q):
        return walk_segments(q, k, v, g, beta, segments, FlashQLAScans())


def cuts_on(device: torch.device) -> bool:
    """Whether long documents are cut on a device: only Hopper, with a release of FlashQLA whose
    internal kernels are tested.
    """
    return on_hopper(device) and flash_qla.is_known()


def parallel_segments(q: Tensor, heads: int) -> int:
    """Return how many segments run at once: one program of each kernel, for a segment and head,
    fills a multiprocessor.
    """
    return max(1, torch.cuda.get_device_properties(q.device).multi_processor_count // heads)
