"""RMS norm of each head and rotary embedding of a part of its channels, on a slice of wider
heads.
"""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from hf_packfree.ops.fused import norm_rope
from tests.ops.triton.compare import TOKENS, assert_matches, random, with_heads_far_apart

KERNELS = {"norm_rope", "norm_rope_backward"}
SIZE = 24


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("rotary", [8, SIZE], ids=["a third of the channels", "all channels"])
def test_values_and_gradients(tokens, rotary, launched, monkeypatch):
    # several tokens of a program
    monkeypatch.setattr(import_module("hf_packfree.ops.fused.norm_rope"), "_PROGRAMS", 7)
    (angle,) = random((1, tokens, rotary // 2), seed=3)
    cos, sin = (torch.cat([turn, turn], -1) for turn in (angle.cos(), angle.sin()))

    def op(x, weight, *, backend):
        return norm_rope(
            x[..., :SIZE], weight, cos.to(x.dtype), sin.to(x.dtype), 1e-6, backend=backend
        )

    assert_matches(op, random((1, tokens, 3, 2 * SIZE), (SIZE,)))
    assert launched == KERNELS | {"sum_partials"}


def test_heads_that_lie_far_apart():
    x, weight, cos, sin, d_out = random((1, 2, 3, 8), (8,), (1, 2, 8), (1, 2, 8), (1, 2, 3, 8))
    found = []
    for one in (with_heads_far_apart(x), x.bfloat16()):
        leaves = one.requires_grad_(), weight.clone().requires_grad_()
        out = norm_rope(*leaves, cos, sin, 1e-6, backend="triton")
        found.append([out, *torch.autograd.grad(out, leaves, d_out.bfloat16())])
    assert all(map(torch.equal, *found))
