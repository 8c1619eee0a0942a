"""Adapters in fp32 taken apart for the tensor cores: the kernels here, the products in half
precision exact in fp32.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_packfree.ops.fused import mixed
from hf_packfree.ops.fused.mixed import Split
from tests.ops import test_low_rank
from tests.support import relative_rms

KERNELS = {"split", "add_parts", "outer_gradients"}
# of two parts, which the interpreter cuts off where a GPU rounds
BITS = 2**-16
T, D, F, R = 70, 40, 48, 5


@pytest.fixture(autouse=True)
def on_tensor_cores(monkeypatch):
    """Choose what a GPU chooses, and multiply as its tensor cores do: exactly, and summed in
    fp32.
    """
    monkeypatch.setattr(mixed, "on_tensor_cores", lambda x: True)
    monkeypatch.setattr(mixed, "wide_product", lambda x, w: x.float() @ w.float())
    monkeypatch.setattr(mixed, "_BLOCK", 256)


@pytest.fixture
def on_hopper(monkeypatch):
    """Choose what a GPU of that kind chooses, in small tiles; in fp16, since the interpreter
    does not multiply bfloat16.
    """
    at_once = mixed.gradients_at_once

    def in_fp16(d_out, up, inner, d_inner, scale, split):
        return at_once(d_out.half(), up, inner.half(), d_inner, scale, split=split)

    monkeypatch.setattr(mixed, "on_hopper", lambda x: True)
    monkeypatch.setattr(mixed, "gradients_at_once", in_fp16)
    for name in ("_TILE", "_SPLIT_TILE"):
        monkeypatch.setattr(mixed, name, replace(getattr(mixed, name), rows=16, outputs=32))
    monkeypatch.setattr(mixed, "_PROGRAMS", 6)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(inner):
    """What is inner, [T, n, r], added up."""
    parts = inner.double().view(len(inner), -1, 3, R)
    assert torch.equal(parts[:, :, 0], parts[:, :, 1])
    return (parts[:, :, 1] + parts[:, :, 2]).flatten(1)


def test_fp32_is_not_rounded_to_half_precision(launched):
    x, d_outs = (
        random(T, D, dtype=torch.bfloat16),
        [random(T, F, dtype=torch.bfloat16, seed=i) for i in (1, 2)],
    )
    downs, ups = (
        [random(R, D, seed=3 + i) for i in range(2)],
        [random(F, R, seed=5 + i) for i in range(2)],
    )
    inner, d_inner = Split.inner(x, downs, 1.5), Split.inner_gradient(d_outs, ups, 1.5)
    h = 1.5 * x.double() @ torch.cat(downs).double().T
    d_h = 1.5 * torch.cat([d_out.double() @ up.double() for d_out, up in zip(d_outs, ups)], 1)
    assert relative_rms(whole(inner), h) < BITS and relative_rms(whole(d_inner), d_h) < BITS
    for found, wanted in zip(
        Split.down_gradients(x, d_inner, downs), (d_h.T @ x.double()).chunk(2), strict=True
    ):
        assert found.dtype == torch.float32 and relative_rms(found, wanted) < BITS
    assert_are_gradients_of_b([Split.up_gradient(d_outs[0], inner[:, : 3 * R], ups[0])], d_outs, h)
    sums = (
        inner @ torch.cat([Split.up_factor(up, x) for up in ups], 1).T,
        d_inner @ Split.down_factor(downs, x),
    )
    for found, wanted in zip(
        sums, (h @ torch.cat(ups, 1).double().T, d_h @ torch.cat(downs).double()), strict=True
    ):
        assert relative_rms(found, wanted) < 1.01 * relative_rms(wanted.bfloat16(), wanted), (
            "one rounding"
        )
    assert launched == {"split", "add_parts"}


def assert_are_gradients_of_b(found, d_outs, h):
    for up, d_out, mine in zip(found, d_outs, h.split(R, 1)):
        assert up.dtype == torch.float32 and relative_rms(up, d_out.double().T @ mine) < BITS


@pytest.mark.parametrize("sizes", [(F, F), (7, 100), (1, 33)], ids=str)
@pytest.mark.parametrize("tokens", [1, T])
def test_a_gradient_is_read_once_for_both_of_its_products(sizes, tokens, on_hopper, launched):
    d_outs = [random(tokens, size + 3, dtype=torch.bfloat16, seed=size)[:, 3:] for size in sizes]
    ups, h = [random(size, R, seed=5 + i) for i, size in enumerate(sizes)], random(tokens, 2 * R)
    wide = h.view(-1, 2, 1, R).expand(-1, 2, 3, R).flatten(1) / 3
    inner = mixed.in_pairs(wide, R, 1.0, torch.empty_like(wide, dtype=torch.bfloat16))
    d_inner, d_ups = mixed.outer_gradients(
        Split(), d_outs, ups, inner.chunk(2, 1), 1.5, (True, True)
    )
    assert (
        relative_rms(
            whole(d_inner),
            1.5 * torch.cat([d.double() @ up.double() for d, up in zip(d_outs, ups)], 1),
        )
        < BITS
    )
    assert_are_gradients_of_b(d_ups, d_outs, whole(inner))
    assert launched == {"add_parts", "outer_gradients", "sum_partials"}


def test_no_tokens_give_no_gradient(on_hopper):
    d_out, up, inner = (
        random(0, F, dtype=torch.bfloat16),
        random(F, R),
        random(0, 3 * R, dtype=torch.bfloat16),
    )
    d_inner, (d_up,) = mixed.outer_gradients(Split(), [d_out], [up], [inner], 1.5, (True,))
    assert d_inner.shape == inner.shape and torch.equal(d_up, torch.zeros(F, R))


@pytest.mark.parametrize("rank", [3, 16])
@pytest.mark.parametrize("ups", [torch.float32, torch.float16])
def test_of_every_rank(rank, ups, on_hopper):
    d_out, up = random(T, F, dtype=torch.float16), random(F, rank, dtype=ups, seed=1)
    h = random(T, rank, dtype=torch.float16, seed=2)
    split = ups == torch.float32
    inner = torch.cat([h, h, h / 64], 1) if split else h
    d_inner = inner.new_empty(inner.shape)
    found = mixed.gradients_at_once(d_out, up, inner, d_inner, 0.5, split=split)
    read = d_inner.double()[:, -2 * rank :].view(T, -1, rank).sum(1)
    wanted = [
        d_out.double().T @ (h.double() * (65 / 64 if split else 1)),
        0.5 * d_out.double() @ up.double(),
    ]
    for a, b in zip((found, read), wanted, strict=True):
        assert relative_rms(a, b) < (1e-6 if split else torch.finfo(ups).eps)


@pytest.mark.parametrize(
    "dtypes", [(*[torch.float32] * 2, torch.bfloat16), (torch.float16,) * 3], ids=["fp32", "fp16"]
)
def test_layers_that_read_once_are_no_farther_from_exact_than_the_reference(
    dtypes, on_hopper, launched
):
    test_low_rank.test_half_precision_is_no_farther_from_exact_than_the_reference(*dtypes)
    assert "outer_gradients" in launched


def test_layers_are_no_farther_from_exact_than_the_reference():
    test_low_rank.test_half_precision_is_no_farther_from_exact_than_the_reference(
        torch.float32, torch.float32
    )
