"""Long documents of a row in calls of their own, with torch's flash attention behind cuDNN's
name, and the rest in between.
"""

from __future__ import annotations

import pytest
import torch

from hf_packfree.ops.attention import cudnn, torch_native
from hf_packfree.packing import PackedSequence
from tests.support import relative_rms

LONG = 30


@pytest.fixture
def calls(monkeypatch):
    """What is called, of which the CPU has a stand-in each."""
    found = []

    def document(q, k, v, scale):
        found.append(q.shape[1])
        return torch_native.attend(q, k, v, PackedSequence.from_lengths([q.shape[1]]), scale=scale)

    def rest(q, k, v, packed, scale=None):
        found.append(tuple(packed.lengths))
        return torch_native.attend(q, k, v, packed, scale=scale)

    monkeypatch.setattr(cudnn, "_usable", lambda *x: True)
    monkeypatch.setattr(cudnn, "_attend_document", document)
    monkeypatch.setattr(cudnn.triton_native, "attend", rest)
    return found


@pytest.mark.parametrize(
    "lengths, wanted",
    [
        ([40], [40]),
        ([5, 40, 30, 3, 2], [(5,), 40, 30, (3, 2)]),
        ([30, 29], [30, (29,)]),
        ([29, 5], [(29, 5)]),
        ([31, 33], [31, 33]),
    ],
    ids=str,
)
def test_every_token_is_attended_to_by_its_own_document(lengths, wanted, calls):
    packed, tokens = PackedSequence.from_lengths(lengths), sum(lengths)
    q, k, v = (
        torch.randn(1, tokens, heads, 8, dtype=torch.float64).requires_grad_()
        for heads in (4, 2, 2)
    )
    found, reference = (
        f(q, k, v, packed, scale=0.2)
        for f in (
            lambda *x, **options: cudnn.attend(*x, **options, long=LONG),
            torch_native.attend,
        )
    )
    assert calls == wanted
    assert relative_rms(found, reference) < 1e-12
    weight = torch.randn_like(found)
    gradients = (torch.autograd.grad(out, (q, k, v), weight) for out in (found, reference))
    for a, b in zip(*gradients, strict=True):
        assert relative_rms(a, b) < 1e-12


def test_without_cudnn_the_row_is_the_kernels(calls, monkeypatch):
    monkeypatch.setattr(cudnn, "_usable", lambda *x: False)
    x = torch.randn(1, 40, 2, 8)
    cudnn.attend(x, x, x, PackedSequence.from_lengths([40]), long=LONG)
    assert calls == [(40,)]
