"""Segments on flash-linear-attention's function, with torch's delta rule behind its name; the
kernels are tests/gpu's.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from hf_packfree.ops.delta_rule import fla, gated_delta_rule, gated_delta_rule_with_states
from hf_packfree.ops.delta_rule.fla_segments import FLAScans
from hf_packfree.ops.delta_rule.segments import Segments, walk_segments
from hf_packfree.packing import PackedSequence
from tests.support import relative_rms

CUT = [[30], [64, 64, 9], [128, 64], [5]]
H, HV, K, V = 2, 4, 8, 12


@pytest.fixture
def calls(monkeypatch):
    """Put torch's delta rule behind FLA's function; return the tokens and the values' width of
    every call.
    """
    found = []

    def kernel(
        q,
        k,
        v,
        g,
        beta,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=None,
        chunk_indices=None,
    ):
        assert output_final_state and not use_qk_l2norm_in_kernel and g.dtype == torch.float32
        found.append((q.shape[1], v.shape[3]))
        packed = PackedSequence.from_lengths(cu_seqlens.diff().tolist())
        return gated_delta_rule_with_states(
            q, k, v, g, beta, packed, initial_state, qk_l2norm=False
        )

    monkeypatch.setattr(fla, "_kernel", lambda: kernel)
    return found


def test_documents_in_segments_are_whole_documents(calls):
    """And what no segment waits for is not walked for a summary."""
    packed = PackedSequence.from_lengths([sum(parts) for parts in CUT])
    torch.manual_seed(0)
    q, k = (normalize(torch.randn(1, packed.num_tokens, H, K), dim=-1) for _ in range(2))
    v, g = torch.randn(1, packed.num_tokens, HV, V), -0.02 * torch.rand(1, packed.num_tokens, HV)
    leaves = [x.requires_grad_() for x in (q, k, v, g, torch.rand(1, packed.num_tokens, HV))]
    d_out = torch.randn(1, packed.num_tokens, HV, V)
    wanted = gated_delta_rule(*leaves, packed, qk_l2norm=False)
    wanted_gradients = torch.autograd.grad(wanted, leaves, d_out)
    found = walk_segments(*leaves, Segments.of(packed, CUT), FLAScans())
    gradients = torch.autograd.grad(found, leaves, d_out)
    assert relative_rms(found, wanted) <= 1e-6
    assert max(map(relative_rms, gradients, wanted_gradients)) <= 1e-5
    # the summary is of segments 1 to 4, that of the gradient of 2 to 5
    assert calls == [(265, V + K), (364, V), (265, V), (364, V)]
