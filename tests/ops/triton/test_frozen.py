"""Frozen parameters: no partial sums of their gradients are made, and the other gradients keep
every bit.
"""

from __future__ import annotations

import pytest
import torch

from hf_packfree.ops.conv import causal_conv1d
from hf_packfree.ops.fused import add_norm, gated_rms_norm, gates, norm_rope
from hf_packfree.packing import PackedSequence
from tests.ops.triton.compare import random

T, H, D = 21, 2, 8
HEADS = (1, T, H, D)


def rotated(x, weight):
    cos, sin = random((1, T, D), (1, T, D), seed=2)
    return norm_rope(x, weight, cos, sin, 1e-6, backend="triton")


def convolved(x, weight):
    return causal_conv1d(x, weight, PackedSequence.from_lengths([T - 4, 4]), backend="triton")


OPS = {
    "norm": (
        lambda x, branch, weight: add_norm(x, branch, weight, 1e-6, backend="triton")[0],
        ((1, T, D), (1, T, D)),
        ((D,),),
    ),
    "gated norm": (
        lambda x, z, weight: gated_rms_norm(x, z, weight, 1e-6, backend="triton"),
        (HEADS, HEADS),
        ((D,),),
    ),
    "norm and rotary": (rotated, (HEADS,), ((D,),)),
    "gates": (
        lambda *inputs: sum(gates(*inputs, backend="triton")),
        ((1, T, H), (1, T, H)),
        ((H,), (H,)),
    ),
    "convolution": (convolved, ((1, T, 4 * D),), ((4 * D, 4),)),
}


@pytest.mark.parametrize(("op", "inputs", "parameters"), OPS.values(), ids=OPS)
def test_no_gradient_of_frozen_parameters_is_made(op, inputs, parameters, launched):
    leaves, count = random(*inputs, *parameters), len(inputs)
    trained = [x.requires_grad_() for x in leaves]
    wanted = torch.autograd.grad(op(*trained).sin().sum(), trained)[:count]
    assert "sum_partials" in launched
    launched.clear()
    frozen = [*trained[:count], *(x.detach() for x in trained[count:])]
    found = torch.autograd.grad(op(*frozen).sin().sum(), frozen[:count])
    assert "sum_partials" not in launched and all(
        torch.equal(a, b) for a, b in zip(found, wanted, strict=True)
    )
