"""How FlashQLA's kernels are called for segments, with torch's delta rule behind them; what they
compute is tests/gpu's.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch.nn.functional import normalize

from hf_packfree.ops.delta_rule import flash_qla_segments, gated_delta_rule
from hf_packfree.ops.delta_rule.segments import Segments
from hf_packfree.ops.delta_rule.torch_chunked import TorchScans
from hf_packfree.packing import PackedSequence
from hf_packfree.packing.bounded import filled
from tests.integrations.marks import integration
from tests.support import relative_rms

CUT = [[64, 64, 9], [30], [128, 64]]
PACKED = PackedSequence.from_lengths([sum(parts) for parts in CUT])
SEGMENTS = Segments.of(PACKED, CUT)
H, HV, SIZE = 2, 4, 16
SCALE = SIZE**-0.5


class Kernels:
    """The kernels of release 0.1.3, by the names of their parameters there."""

    def __init__(self):
        self.calls, self.scans = [], TorchScans()

    def chunk_local_cumsum(
        self, g, chunk_size=64, cu_seqlens=None, reverse=False, zero_last_chunk=False
    ):
        assert (
            g.dtype == torch.float32
            and g.is_contiguous()
            and chunk_size == 64
            and self.is_plan(cu_seqlens)
        )
        return g + 1

    def kkt_solve(self, k, b, chunk_size=64, cu_seqlens=None):
        assert chunk_size == 64 and self.is_plan(cu_seqlens)
        return k.new_full((1, k.shape[1], b.shape[2], 64), 3)

    def saved(self, q, k, v, a, g, b):
        assert (a == 3).all() and a.shape[2] == HV
        return (k if q is None else q), k, v, g - 1, b

    def is_plan(self, offsets):
        return (
            offsets.tolist() == [0, 64, 128, 137, 167, 295, 359]
            and offsets._flash_qla_prepared_varlen[0] == 64
        )

    def tilelang_prepare_h(
        self,
        H,
        Hg,
        DK,
        DV,
        chunk_size,
        accum_dtype,
        qkva_dtype,
        g_dtype,
        b_dtype,
        h0_dtype,
        ht_dtype,
        h_dtype,
        seqlen_dtype,
        use_initial_state,
        store_final_state,
        store_h,
        is_varlen,
        is_cp,
        state_v_first,
        num_stages=2,
    ):
        assert (H, Hg, DK, DV, chunk_size) == (HV, 2, SIZE, SIZE, 64)
        assert (accum_dtype, seqlen_dtype, state_v_first) == ("float32", torch.int32, False)
        assert (use_initial_state, store_final_state, store_h, is_varlen, is_cp) == (
            False,
            True,
            False,
            True,
            True,
        )

        def kernel(k, v, a, g, b, h0, cu_seqlens, chunk_offsets, num_warmup_chunks, h, ht, mt):
            assert self.is_plan(cu_seqlens) and chunk_offsets.tolist() == [0, 1, 2, 3, 4, 6, 7]
            assert (
                num_warmup_chunks.T.tolist() == [[1, 1, 0, 0, 2, 0]] * HV
                and num_warmup_chunks.is_contiguous()
            )
            assert h0.shape == ht.shape == mt.shape == (6, HV, SIZE, SIZE) and h.shape == (
                1,
                0,
                HV,
                SIZE,
                SIZE,
            )
            assert (
                ht.dtype == mt.dtype == ht_dtype == h0_dtype == torch.float32
                and ht.is_contiguous()
                and mt.is_contiguous()
            )
            found = self.scans.summarize(self.saved(None, k, v, a, g, b), SEGMENTS)
            for out, value in zip((mt, ht), found, strict=True):
                out.copy_(value * (num_warmup_chunks > 0)[..., None, None])
            self.calls.append("summarize")

        return kernel

    def fused_gdr_fwd(
        self,
        q,
        k,
        v,
        a,
        g,
        b,
        scale=None,
        initial_state=None,
        output_final_state=True,
        output_h=False,
        output_o=True,
        cu_seqlens=None,
        cp_seq_map=None,
        raw_cu_seqlens=None,
        state_v_first=False,
    ):
        assert (scale or SCALE, output_final_state, output_h, output_o, cp_seq_map) == (
            SCALE,
            False,
            False,
            True,
            None,
        )
        assert self.is_plan(cu_seqlens) and raw_cu_seqlens is cu_seqlens
        self.calls.append("walk")
        out = self.scans.walk(self.saved(q, k, v, a, g, b), initial_state, SEGMENTS)
        return out, None, None

    def fused_gdr_dh(
        self,
        q,
        k,
        a,
        g,
        b,
        do,
        dht=None,
        output_dh0=True,
        output_dh=True,
        scale=None,
        cu_seqlens=None,
        num_warmup_chunks=None,
        state_v_first=False,
    ):
        assert (
            dht is None
            and (output_dh0, output_dh, scale or SCALE) == (True, False, SCALE)
            and self.is_plan(cu_seqlens)
        )
        assert num_warmup_chunks.T.tolist() == [[0, 1, 1, 0, 0, 1]] * HV and do.is_contiguous()
        self.calls.append("summarize gradient")
        found = self.scans.summarize_gradient(
            self.saved(q, k, do.new_zeros(do.shape), a, g, b), do, SEGMENTS
        )
        return None, found * (num_warmup_chunks > 0)[..., None, None]

    def chunk_gated_delta_rule_bwd(
        self,
        q,
        k,
        v,
        g,
        beta,
        A,
        do,
        dht=None,
        scale=None,
        initial_state=None,
        cu_seqlens=None,
        state_v_first=False,
        auto_cp=True,
        cp_cache=None,
        cp_context=None,
    ):
        assert (
            (scale, auto_cp) == (SCALE, False) and self.is_plan(cu_seqlens) and dht.is_contiguous()
        )
        self.calls.append("walk back")
        found = self.scans.walk_back(
            self.saved(q, k, v, A, g, beta), initial_state, do, dht, SEGMENTS
        )
        d_q, d_k, d_v, d_g, d_beta, d_initial = found
        return d_q.double(), d_k, d_v, d_beta, d_g, d_initial


@pytest.fixture
def kernels(monkeypatch):
    found = Kernels()
    parts = ["flash_qla", "ops", "gated_delta_rule", "chunk", "hopper", "prepare_h"]
    for name in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
        module = ModuleType(name)
        vars(module).update(
            {
                kernel: getattr(found, kernel)
                for kernel in vars(Kernels)
                if not kernel.startswith("_")
            }
        )
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flash_qla_segments.flash_qla, "is_known", lambda: True)
    yield found
    SEGMENTS.record._memo.clear()


@integration(
    "FlashQLA",
    "long documents in segments side by side",
    "works; here with the delta rule in torch behind its functions, its kernels are checked on "
    "GPUs only (`-m gpu`)",
)
@pytest.mark.parametrize("qk_l2norm", [False, True], ids=["unit", "raw"])
def test_segments_on_its_kernels_equal_documents_whole(qk_l2norm, kernels, record_property):
    torch.manual_seed(0)
    shapes = ((1, PACKED.num_tokens, heads, SIZE) for heads in (H, H, HV))
    q, k, v = (torch.randn(shape) for shape in shapes)
    q, k = (x if qk_l2norm else normalize(x, dim=-1) for x in (q, k))
    g, beta = -torch.rand(1, PACKED.num_tokens, HV) / 100, torch.rand(1, PACKED.num_tokens, HV) / 10
    found, wanted = (
        [x.detach().clone().requires_grad_() for x in (q, k, v, g, beta)] for _ in range(2)
    )
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = flash_qla_segments.in_segments(*found, SEGMENTS, qk_l2norm)
    # nothing that is made only for the forward pass hangs on what the backward pass reads
    states = [x for x in kept if x.shape == (6, HV, SIZE, SIZE)]
    assert len(states) == 2 and all(x.untyped_storage().nbytes() == x.nbytes for x in states)
    reference = gated_delta_rule(*wanted, PACKED, qk_l2norm=qk_l2norm)
    weight = torch.randn_like(out)
    gradients = [
        torch.autograd.grad(one, leaves, weight)
        for one, leaves in ((out, found), (reference, wanted))
    ]
    assert kernels.calls == ["summarize", "walk", "summarize gradient", "walk back"]
    assert relative_rms(out, reference) < 2e-6
    for a, b in zip(*gradients, strict=True):
        record_property("error", error := relative_rms(a, b))
        assert a.dtype == b.dtype and error < 2e-5


def test_a_row_is_cut_where_its_kernels_are_known(monkeypatch):
    called = []
    monkeypatch.setattr(flash_qla_segments, "parallel_segments", lambda q, heads: 8)
    monkeypatch.setattr(
        flash_qla_segments, "in_segments", lambda *x: called.append(x[5].record.lengths)
    )
    monkeypatch.setattr(
        flash_qla_segments.flash_qla, "gated_delta_rule", lambda *x: called.append(x[5].lengths)
    )
    x = torch.zeros(1, 1, 1, 1)
    long, short = PackedSequence.from_lengths([8192]), PackedSequence.from_lengths([50])
    for cuts in (True, False):
        monkeypatch.setattr(flash_qla_segments, "cuts_on", lambda device: cuts)
        for packed in (long, short):
            flash_qla_segments.gated_delta_rule(x, x, x, x, x, packed, False)
    assert list(map(list, called)) == [[1024] * 8, [50], [8192], [50]]
    called.clear()
    monkeypatch.setattr(flash_qla_segments, "cuts_on", lambda device: True)
    for packed in (long, short):
        row = filled(packed, packed.num_tokens, 16, packed.num_tokens)
        flash_qla_segments.gated_delta_rule(x, x, x, x, x, row, False)
    assert list(map(list, called)) == [[1024] * 8 + [0] * 16, [50] + [0] * 15]
