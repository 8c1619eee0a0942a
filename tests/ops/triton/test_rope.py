"""Rotary embedding of q and k beside v, as a vision tower's projection leaves them."""

from __future__ import annotations

import pytest
import torch

from hf_packfree.ops.fused import qkv_rope, rope
from tests.ops.triton.compare import TOKENS, assert_matches, random, with_heads_far_apart

OF_TOWERS = {"qkv_rope", "qkv_rope_backward"}
KERNELS = OF_TOWERS | {"rope"}


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("heads, size", [(3, 8), (2, 24)])
def test_values_and_gradients(tokens, heads, size, launched):
    (angle,) = random((tokens, size // 2), seed=3)
    cos, sin = (torch.cat([turn, turn], -1) for turn in (angle.cos(), angle.sin()))

    def op(qkv, *, backend):
        return qkv_rope(qkv, cos.to(qkv.dtype), sin.to(qkv.dtype), backend=backend)

    assert_matches(op, random((tokens, 3, heads, size)))
    assert launched == OF_TOWERS


def test_half_precision_is_rounded_once():
    (angle,) = random((5, 8), seed=3)
    cos, sin = (torch.cat([turn, turn], -1) for turn in (angle.cos(), angle.sin()))
    qkv = random((5, 3, 2, 16))[0].half()
    for found, wanted in zip(
        qkv_rope(qkv, cos, sin, backend="triton"), qkv_rope(qkv, cos, sin), strict=True
    ):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("rotary", [8, 24], ids=["a third of the channels", "all channels"])
@pytest.mark.parametrize("heads", [3, 4])
def test_queries_on_a_slice_of_wider_heads(tokens, rotary, heads, launched):
    (angle,) = random((1, tokens, rotary // 2), seed=3)
    cos, sin = (torch.cat([turn, turn], -1) for turn in (angle.cos(), angle.sin()))

    def op(x, *, backend):
        return rope(x[..., :24], cos.to(x.dtype), sin.to(x.dtype), backend=backend)

    assert_matches(op, random((1, tokens, heads, 48)))
    assert launched == KERNELS - OF_TOWERS


def test_heads_that_lie_far_apart():
    x, cos, sin = random((1, 2, 3, 8), (1, 2, 8), (1, 2, 8))
    apart = with_heads_far_apart(x)
    assert torch.equal(*(rope(one, cos, sin, backend="triton") for one in (apart, x.bfloat16())))
