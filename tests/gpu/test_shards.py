"""What ranks that share a row compute, on every backend: attention to keys before the row,
documents walked in segments.
"""

from __future__ import annotations

import pytest
import torch

from hf_packfree.ops.attention import OP as ATTEND
from hf_packfree.ops.attention import attention
from hf_packfree.ops.backend import Target
from hf_packfree.ops.delta_rule import OP as DELTA_RULE
from hf_packfree.ops.delta_rule import gated_delta_rule
from hf_packfree.ops.delta_rule.even_segments import cut_evenly
from hf_packfree.ops.delta_rule.segments import Segments, walk_segments
from hf_packfree.packing import PackedSequence
from hf_packfree.packing.bounded import filled
from tests.gpu.checks import ATTENTION, DEVICE, HEADS, TRIAL, gpu
from tests.gpu.op import as_leaves
from tests.gpu.op_table import unit_leaves
from tests.support import relative_rms

pytestmark = gpu
VALUES, GRADIENTS = 1e-2, 3e-2
CUT = [[64, 64, 9], [30], [640, 500], [1]]


@pytest.mark.parametrize("backend", ["torch"] if TRIAL else ATTEND.backends)
@pytest.mark.parametrize(
    "history, lengths", [(0, [70, 5]), (3, [1, 200]), (300, [130, 64, 1]), (129, [500])]
)
def test_queries_are_the_last_of_their_document(backend, history, lengths):
    torch.manual_seed(0)
    (heads, keys, size), tokens, dtype = (
        ATTENTION,
        sum(lengths),
        torch.float32 if TRIAL else torch.bfloat16,
    )
    shapes = ((1, tokens, heads, size), *((1, history + tokens, keys, size),) * 2)
    leaves = [torch.randn(shape, device=DEVICE, dtype=dtype).requires_grad_() for shape in shapes]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    before = torch.zeros(1, history, heads, size, device=DEVICE, dtype=torch.float64)
    longer = PackedSequence.from_lengths([history + lengths[0], *lengths[1:]], device=DEVICE)
    wanted = attention(torch.cat([before, wide[0]], 1), *wide[1:], longer)[:, history:]
    attend = ATTEND.backend(backend).with_history
    found = attend(*leaves, PackedSequence.from_lengths(lengths, device=DEVICE))
    assert_near(found, leaves, wanted, wide)


@pytest.mark.parametrize("bounded", [False, True], ids=["", "bounded"])
@pytest.mark.parametrize("backend", DELTA_RULE.backends)
def test_documents_in_segments_are_whole_documents(backend, bounded):
    if bounded and DELTA_RULE.backends[backend].long is None and not TRIAL:
        pytest.skip(f"{backend} cuts no documents of one device's rows")
    dtype = torch.float32 if TRIAL else torch.bfloat16
    capability = None if TRIAL else torch.cuda.get_device_capability()
    if (
        reason := DELTA_RULE.backends[backend].unusable(
            Target(DEVICE, capability, dtype, {"key_size": HEADS[2]})
        )
    ) is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    packed = PackedSequence.from_lengths([sum(parts) for parts in CUT], device=DEVICE)
    leaves = [*as_leaves(unit_leaves(packed.num_tokens), dtype).values()]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = gated_delta_rule(*wide, packed, qk_l2norm=False)
    scans, segments = DELTA_RULE.backends[backend].scans, Segments.of(packed, CUT)
    if bounded:
        # ends with its last document, then come empty ones
        row = filled(packed, packed.num_tokens, 16, packed.num_tokens)
        segments = Segments(*row.cached(cut_evenly, 2))
    found = walk_segments(*leaves, segments, scans)
    assert_near(found, leaves, wanted, wide)


def assert_near(found, leaves, wanted, wide) -> None:
    """Assert that values and gradients of a fixed random functional are within rounding of those
    in fp64.
    """
    d_out = torch.randn_like(wanted)
    gradients = torch.autograd.grad(found, leaves, d_out.to(found.dtype))
    assert relative_rms(found, wanted) <= VALUES
    errors = map(relative_rms, gradients, torch.autograd.grad(wanted, wide, d_out))
    assert max(errors) <= GRADIENTS
