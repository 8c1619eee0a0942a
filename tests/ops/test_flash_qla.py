"""How FlashQLA is called, with torch's delta rule behind its names; what it computes is
tests/gpu's.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from hf_packfree.ops.delta_rule import (
    flash_qla,
    gated_delta_rule,
    gated_delta_rule_with_states,
)
from hf_packfree.packing import PackedSequence
from tests.support import relative_rms

PACKED = PackedSequence.from_lengths([5, 70, 1, 64])
T, H, HV, K = PACKED.num_tokens, 2, 4, 128


class Stand_in(ModuleType):
    """Its three functions, which note how they were called."""

    def __init__(self):
        super().__init__("flash_qla")
        self.calls = []

    def chunk_gated_delta_rule(
        self, q, k, v, g, beta, *, use_qk_l2norm_in_kernel, cu_seqlens, auto_cp, **states
    ):
        self.calls.append("whole")
        assert cu_seqlens is PLAN and not auto_cp
        if states:
            assert states.pop("output_final_state")
            states |= {"qk_l2norm": use_qk_l2norm_in_kernel}
            return gated_delta_rule_with_states(q, k, v, g, beta, PACKED, **states)
        return gated_delta_rule(q, k, v, g, beta, PACKED, qk_l2norm=use_qk_l2norm_in_kernel), None

    def chunk_gated_delta_rule_fwd(
        self,
        q,
        k,
        v,
        g,
        beta,
        scale,
        *,
        output_final_state,
        cu_seqlens,
        auto_cp,
        initial_state=None,
    ):
        self.calls.append("forward")
        assert (scale, output_final_state, auto_cp) == (
            K**-0.5,
            initial_state is not None,
            False,
        ) and cu_seqlens is PLAN
        assert g.dtype == torch.float32 and all(x.is_contiguous() for x in (q, k, v, g, beta))
        out, final = run(q, k, v, g, beta, initial_state)
        return g + 1, v + 2, out, None, final, None

    def chunk_gated_delta_rule_bwd(
        self,
        q,
        k,
        v,
        g,
        beta,
        A,
        do,
        *,
        scale,
        cu_seqlens,
        auto_cp,
        dht=None,
        initial_state=None,
    ):
        self.calls.append("backward")
        assert (
            torch.equal(A, v + 2)
            and (scale, auto_cp) == (K**-0.5, False)
            and cu_seqlens is PLAN
            and do.is_contiguous()
        )
        given = q, k, v, g - 1, beta, *([] if initial_state is None else [initial_state])
        leaves = [x.detach().requires_grad_() for x in given]
        with torch.enable_grad():
            outs = run(*leaves)
        d_outs = [do] if dht is None else [do, dht]
        grads = torch.autograd.grad(outs[: len(d_outs)], leaves, d_outs)
        d_q, d_k, d_v, d_g, d_beta, *d_initial = grads
        # wide where heads are summed, and write strengths before decays
        return d_q.double(), d_k, d_v, d_beta, d_g, *(d_initial or [None])


def run(q, k, v, g, beta, initial_state=None):
    """The reference of its two passes."""
    if initial_state is None:
        return gated_delta_rule(q, k, v, g, beta, PACKED, qk_l2norm=False), None
    return gated_delta_rule_with_states(q, k, v, g, beta, PACKED, initial_state, qk_l2norm=False)


PLAN = torch.tensor(0)


@pytest.fixture
def stand_in(monkeypatch):
    module = Stand_in()
    monkeypatch.setitem(sys.modules, "flash_qla", module)
    monkeypatch.setattr(flash_qla, "planned_cu_seqlens", lambda packed: PLAN)
    yield module
    PACKED._memo.clear()
    flash_qla.is_known.cache_clear()


def leaves():
    torch.manual_seed(0)
    # not contiguous
    q, k, v = (torch.randn(1, T, 2 * K, heads).mT[..., :K].detach() for heads in (H, H, HV))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    g, beta = -torch.rand(1, T, HV, dtype=torch.float64) / 20, torch.rand(1, T, HV)
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


@pytest.mark.parametrize(
    "version, qk_l2norm, calls",
    [
        ("0.1.3", False, ["forward", "backward"]),
        ("0.1.3", True, ["whole"]),
        ("0.9", False, ["whole"]),
    ],
)
def test_every_way_of_calling_it_equals_the_reference(
    stand_in, monkeypatch, version, qk_l2norm, calls
):
    """A known release is called by its two passes where it need not divide q and k by their
    norms.
    """
    monkeypatch.setattr(flash_qla, "installed", lambda package: version)
    flash_qla.is_known.cache_clear()
    found, wanted = leaves(), leaves()
    weight = torch.randn(1, T, HV, K).transpose(1, 2).contiguous().transpose(1, 2)
    out, reference = (
        gated_delta_rule(*inputs, PACKED, qk_l2norm=qk_l2norm, backend=name)
        for inputs, name in ((found, "flash_qla"), (wanted, "torch"))
    )
    (out * weight).sum().backward()
    (reference * weight).sum().backward()
    assert stand_in.calls == calls
    assert relative_rms(out, reference) < 1e-6
    for a, b in zip(found, wanted, strict=True):
        assert a.grad.dtype == a.dtype and relative_rms(a.grad, b.grad) < 1e-5


@pytest.mark.parametrize(
    "version, qk_l2norm, calls",
    [
        ("0.1.3", False, ["forward", "backward"]),
        ("0.1.3", True, ["whole"]),
        ("0.9", False, ["whole"]),
    ],
)
def test_states_go_in_and_come_out(stand_in, monkeypatch, version, qk_l2norm, calls):
    monkeypatch.setattr(flash_qla, "installed", lambda package: version)
    flash_qla.is_known.cache_clear()
    states = torch.randn(2, PACKED.num_segments, HV, K, K)
    weights = torch.randn(1, T, HV, K), states[1]
    found, wanted = ([*leaves(), states[0].clone().requires_grad_()] for _ in range(2))
    ways = []
    for inputs, name in ((found, "flash_qla"), (wanted, "torch")):
        *rows, initial = inputs
        outs = gated_delta_rule_with_states(
            *rows, PACKED, initial, qk_l2norm=qk_l2norm, backend=name
        )
        sum((out * weight).sum() for out, weight in zip(outs, weights, strict=True)).backward()
        ways.append(outs)
    assert stand_in.calls == calls
    for a, b in zip(*ways, strict=True):
        assert relative_rms(a, b) < 1e-6
    for a, b in zip(found, wanted, strict=True):
        assert a.grad.dtype == a.dtype and relative_rms(a.grad, b.grad) < 1e-5


def test_a_known_release_gets_its_plan(monkeypatch):
    """What its own function attaches, which takes some operations for each document; tests/gpu
    compares the two.
    """
    monkeypatch.setattr(flash_qla, "is_known", lambda: True)
    planned = flash_qla.planned_cu_seqlens(PACKED)
    assert torch.equal(planned, PACKED.cu_seqlens) and planned is not PACKED.cu_seqlens
    size, firsts, count, chunks = planned._flash_qla_prepared_varlen
    assert (size, count, firsts.tolist()) == (64, 5, [0, 1, 3, 4, 5])
    assert chunks.tolist() == [[0, 0], [1, 0], [1, 1], [2, 0], [3, 0]]
    assert {planned.dtype, firsts.dtype, chunks.dtype} == {torch.int32} and chunks.is_contiguous()


def test_an_unknown_release_plans_by_itself(monkeypatch):
    asked = ModuleType("flash_qla.utils.index")
    asked.prepare_varlen_metadata = lambda offsets, host: (offsets, host)
    for name in ("flash_qla", "flash_qla.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, asked.__name__, asked)
    monkeypatch.setattr(flash_qla, "is_known", lambda: False)
    offsets, host = flash_qla.planned_cu_seqlens(PACKED)
    assert (
        torch.equal(offsets, PACKED.cu_seqlens)
        and offsets is not PACKED.cu_seqlens
        and host is PACKED.cu_seqlens_cpu
    )
