"""Adapters in fp32 taken apart for the tensor cores: the kernels here, the products in half
precision exact in fp32.
"""

from __future__ import annotations

import pytest
import torch

from hf_packfree.ops.fused import lora, lora_kernels, lora_products
from hf_packfree.ops.fused.lora_kernels import split_fp32
from hf_packfree.ops.fused.lora_products import SplitFp32
from tests.ops import test_lora
from tests.support import relative_rms

KERNELS = {"split", "add_parts", "add_blocks", "lora_gradients"}
# of two parts, which the interpreter cuts off where a GPU rounds
BITS = 2**-16
T, D, F, R = 70, 40, 48, 5


@pytest.fixture(autouse=True)
def on_tensor_cores(monkeypatch):
    """Choose what a GPU chooses, and multiply as its tensor cores do: exactly, and summed in
    fp32.
    """
    for module in (lora, lora_products):
        monkeypatch.setattr(module, "on_tensor_cores", lambda x: True)
    monkeypatch.setattr(lora_products, "wide_product", lambda x, w: x.float() @ w.float())
    monkeypatch.setattr(lora_kernels, "_BLOCK", 256)


@pytest.fixture
def on_hopper(monkeypatch):
    """Choose what a GPU of that kind chooses, in small tiles; in fp16, since the interpreter
    does not multiply bfloat16.
    """
    at_once = lora_products.gradients_at_once

    def in_fp16(d_outs, Bs, h, d_h, scaling, split):
        halves = [d_out.half() for d_out in d_outs]
        return at_once(halves, Bs, h.half(), d_h, scaling, split=split)

    monkeypatch.setattr(lora_products, "on_hopper", lambda x: True)
    monkeypatch.setattr(lora_products, "gradients_at_once", in_fp16)
    for name in ("_TILE", "_SPLIT_TILE"):
        monkeypatch.setattr(
            lora_kernels, name, getattr(lora_kernels, name) | {"ROWS": 16, "OUTPUTS": 32}
        )
    monkeypatch.setattr(lora_kernels, "_PROGRAMS", 6)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(h):
    """h of n adapters, [T, n 3 r], with its parts added up, [T, n r]."""
    parts = h.double().view(len(h), -1, 3, R)
    assert torch.equal(parts[:, :, 0], parts[:, :, 1])
    return (parts[:, :, 1] + parts[:, :, 2]).flatten(1)


@pytest.mark.parametrize("sizes", [(F,), (F, 1), (7, 300, 1, 33), (3, 20) * 3], ids=str)
def test_fp32_is_a_sum_of_three_parts(sizes):
    ws = [random(size, R, seed=i) for i, size in enumerate(sizes)]
    w = torch.cat(ws)
    parts, paired = (split_fp32(ws, R, paired=paired).double() for paired in (False, True))
    assert relative_rms(parts.sum(1), w.double()) < 2**-24
    assert torch.equal(paired, parts[:, [0, 1, 0]]), "the factor for [h1, h1, h2]"
    assert (parts[:, 1].abs() <= 2**-7 * parts[:, 0].abs()).all(), "each is the rest rounded"


def test_fp32_is_not_rounded_to_half_precision(launched):
    x = random(T, D, dtype=torch.bfloat16)
    d_outs = [random(T, F, dtype=torch.bfloat16, seed=i) for i in (1, 2)]
    As, Bs = (
        [random(*size, seed=seed + i) for i in range(2)]
        for size, seed in (((R, D), 3), ((F, R), 5))
    )
    products = SplitFp32()
    h, d_h = products.h(x, As, 1.5), products.d_h(d_outs, Bs, 1.5)
    exact_h = 1.5 * x.double() @ torch.cat(As).double().T
    exact_d_h = 1.5 * torch.cat([d_out.double() @ B.double() for d_out, B in zip(d_outs, Bs)], 1)
    assert relative_rms(whole(h), exact_h) < BITS and relative_rms(whole(d_h), exact_d_h) < BITS
    for found, wanted in zip(
        products.d_A(x, d_h, As), (exact_d_h.T @ x.double()).chunk(2), strict=True
    ):
        assert found.dtype == torch.float32 and relative_rms(found, wanted) < BITS
    assert_are_gradients_of_b([products.d_B(d_outs[0], h[:, : 3 * R], Bs[0])], d_outs, exact_h)
    sums = {
        h @ torch.cat([*products.factors_B(Bs)], 1).T: exact_h @ torch.cat(Bs, 1).double().T,
        d_h @ products.factor_A(As): exact_d_h @ torch.cat(As).double(),
    }
    for found, wanted in sums.items():
        assert relative_rms(found, wanted) < 1.01 * relative_rms(wanted.bfloat16(), wanted), (
            "one rounding"
        )
    assert launched == {"split", "add_parts"}


def assert_are_gradients_of_b(found, d_outs, h):
    for d_B, d_out, mine in zip(found, d_outs, h.split(R, 1)):
        assert d_B.dtype == torch.float32 and relative_rms(d_B, d_out.double().T @ mine) < BITS


@pytest.mark.parametrize(
    "sizes", [(F, F), (7, 100), (1, 33), (600, 7, 129), (1, 130, 16, 7), (20,) * 6], ids=str
)
@pytest.mark.parametrize("tokens", [1, T])
def test_a_gradient_is_read_once_for_both_of_its_products(sizes, tokens, on_hopper, launched):
    n = len(sizes)
    d_outs = [random(tokens, size + 3, dtype=torch.bfloat16, seed=size)[:, 3:] for size in sizes]
    Bs = [random(size, R, seed=5 + i) for i, size in enumerate(sizes)]
    wide = random(tokens, n * R).view(-1, n, 1, R).expand(-1, n, 3, R).flatten(1) / 3
    h = lora_products.add_parts(wide, torch.empty_like(wide, dtype=torch.bfloat16), R, 1.0)
    d_h, d_Bs = SplitFp32().d_h_and_d_B(d_outs, Bs, h, 1.5, (True,) * n)
    wanted = 1.5 * torch.cat([d.double() @ B.double() for d, B in zip(d_outs, Bs)], 1)
    assert relative_rms(whole(d_h), wanted) < BITS
    assert_are_gradients_of_b(d_Bs, d_outs, whole(h))
    assert launched == {"add_parts", "add_blocks", "lora_gradients", "sum_partials"}


def test_no_tokens_give_no_gradient(on_hopper):
    d_out, B = random(0, F, dtype=torch.bfloat16), random(F, R)
    h = random(0, 3 * R, dtype=torch.bfloat16)
    d_h, (d_B,) = SplitFp32().d_h_and_d_B([d_out], [B], h, 1.5, (True,))
    assert d_h.shape == h.shape and torch.equal(d_B, torch.zeros(F, R))


@pytest.mark.parametrize("rank", [3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_of_every_rank(rank, dtype, on_hopper):
    d_out, B = random(T, F, dtype=torch.float16), random(F, rank, dtype=dtype, seed=1)
    exact_h = random(T, rank, dtype=torch.float16, seed=2)
    split = dtype == torch.float32
    h = torch.cat([exact_h, exact_h, exact_h / 64], 1) if split else exact_h
    d_h = h.new_empty(h.shape)
    (found,) = lora_products.gradients_at_once([d_out], [B], h, d_h, 0.5, split=split)
    read = d_h.double()[:, -2 * rank :].view(T, -1, rank).sum(1)
    wanted = [
        d_out.double().T @ (exact_h.double() * (65 / 64 if split else 1)),
        0.5 * d_out.double() @ B.double(),
    ]
    for a, b in zip((found, read), wanted, strict=True):
        assert relative_rms(a, b) < (1e-6 if split else torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    "dtypes", [(*[torch.float32] * 2, torch.bfloat16), (torch.float16,) * 3], ids=["fp32", "fp16"]
)
def test_layers_that_read_once_are_no_farther_from_exact_than_the_reference(
    dtypes, on_hopper, launched
):
    test_lora.test_half_precision_is_no_farther_from_exact_than_the_reference(*dtypes)
    assert "lora_gradients" in launched


def test_layers_are_no_farther_from_exact_than_the_reference():
    test_lora.test_half_precision_is_no_farther_from_exact_than_the_reference(
        torch.float32, torch.float32
    )
