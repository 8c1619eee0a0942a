"""Attention of a row whose first document began before it, on every backend: what the longer row's tokens get."""

from __future__ import annotations

import pytest
import torch

from hf_packfree.ops.attention import WITH_HISTORY, attention, attention_with_history
from hf_packfree.packing import PackedSequence
from tests.gpu.checks import ATTENTION, DEVICE, TRIAL, gpu
from tests.support import relative_rms

pytestmark = gpu
HEADS, KEYS, SIZE = ATTENTION


@pytest.mark.parametrize("backend", ["torch"] if TRIAL else WITH_HISTORY)
@pytest.mark.parametrize("history, lengths", [(0, [70, 5]), (3, [1, 200]), (300, [130, 64, 1]), (129, [500])])
def test_queries_are_the_last_of_their_document(backend, history, lengths):
    torch.manual_seed(0)
    tokens, dtype = sum(lengths), torch.float32 if TRIAL else torch.bfloat16
    shapes = ((1, tokens, HEADS, SIZE), *((1, history + tokens, KEYS, SIZE),) * 2)
    leaves = [torch.randn(shape, device=DEVICE, dtype=dtype).requires_grad_() for shape in shapes]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    before = torch.zeros(1, history, HEADS, SIZE, device=DEVICE, dtype=torch.float64)
    longer = PackedSequence.from_lengths([history + lengths[0], *lengths[1:]], device=DEVICE)
    wanted = attention(torch.cat([before, wide[0]], 1), *wide[1:], longer)[:, history:]
    found = attention_with_history(*leaves, PackedSequence.from_lengths(lengths, device=DEVICE), backend=backend)
    d_out = torch.randn_like(wanted)
    pairs = zip(torch.autograd.grad(found, leaves, d_out.to(dtype)), torch.autograd.grad(wanted, wide, d_out), strict=True)
    assert relative_rms(found, wanted) <= 1e-2
    assert all(relative_rms(gradient, exact) <= 3e-2 for gradient, exact in pairs)
