"""Adapters in fp32 taken apart for the tensor cores: the kernels here, the products in half precision exact in fp32."""

from __future__ import annotations

import pytest
import torch

from hf_packfree.ops.fused import mixed
from hf_packfree.ops.fused.mixed import Split
from tests.ops import test_low_rank
from tests.support import relative_rms

KERNELS = {"split", "in_pairs"}
BITS = 2**-16  # of two parts, which the interpreter cuts off where a GPU rounds
T, D, F, R = 70, 40, 48, 5


@pytest.fixture(autouse=True)
def on_tensor_cores(monkeypatch):
    """Choose what a GPU chooses, and multiply as its tensor cores do: exactly, and summed in fp32."""
    monkeypatch.setattr(mixed, "on_tensor_cores", lambda x: True)
    monkeypatch.setattr(mixed, "wide_product", lambda x, w: x.float() @ w.float())
    monkeypatch.setattr(mixed, "_BLOCK", 256)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(inner):
    """What is inner, [T, n, r], added up."""
    parts = inner.double().view(len(inner), -1, 3, R)
    assert torch.equal(parts[:, :, 0], parts[:, :, 1])
    return (parts[:, :, 1] + parts[:, :, 2]).flatten(1)


def test_fp32_is_not_rounded_to_half_precision(launched):
    x, d_outs = random(T, D, dtype=torch.bfloat16), [random(T, F, dtype=torch.bfloat16, seed=i) for i in (1, 2)]
    downs, ups = [random(R, D, seed=3 + i) for i in range(2)], [random(F, R, seed=5 + i) for i in range(2)]
    inner, d_inner = Split.inner(x, downs, 1.5), Split.inner_gradient(d_outs, ups, 1.5)
    h = 1.5 * x.double() @ torch.cat(downs).double().T
    d_h = 1.5 * torch.cat([d_out.double() @ up.double() for d_out, up in zip(d_outs, ups)], 1)
    assert relative_rms(whole(inner), h) < BITS and relative_rms(whole(d_inner), d_h) < BITS
    for found, wanted in zip(Split.down_gradients(x, d_inner, 2), (d_h.T @ x.double()).chunk(2), strict=True):
        assert found.dtype == torch.float32 and relative_rms(found, wanted) < BITS
    up = Split.up_gradient(d_outs[0], inner[:, : 3 * R])
    assert up.dtype == torch.float32 and relative_rms(up, d_outs[0].double().T @ h[:, :R]) < BITS
    sums = inner @ torch.cat([Split.up_factor(up, x) for up in ups], 1).T, d_inner @ Split.down_factor(downs, x)
    for found, wanted in zip(sums, (h @ torch.cat(ups, 1).double().T, d_h @ torch.cat(downs).double()), strict=True):
        assert relative_rms(found, wanted) < 1.01 * relative_rms(wanted.bfloat16(), wanted), "one rounding"
    assert launched == KERNELS


def test_layers_are_no_farther_from_exact_than_the_reference():
    test_low_rank.test_half_precision_is_no_farther_from_exact_than_the_reference(torch.float32)
