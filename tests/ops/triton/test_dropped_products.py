"""Products with what LoRA's dropout leaves of a tensor, whose masks the kernels draw."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from hf_packfree.ops import dropout
from hf_packfree.ops.fused import dropped_products, lora, lora_products
from hf_packfree.ops.fused import projections as fused
from hf_packfree.ops.fused.dropped_products import Mask, add, gradient, times
from hf_packfree.ops.fused.lora import Adapter, LoraLinear
from hf_packfree.ops.seeds import Seed

KERNELS = {"times_dropped", "gradient_of_factor", "add_dropped"}
RATE = 0.25
SIZES = [(129, 67, 3), (64, 64, 16), (130, 200, 48), (1, 640, 16)]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(dropped_products, "_on_a_gpu", lambda x: True)
    monkeypatch.setattr(dropped_products, "_STEPS", 2)
    monkeypatch.setattr(dropped_products, "_PROGRAMS", 2)


def mask_of(base: int, number: int = 3, rate: float = RATE) -> Mask:
    return Mask(Seed(torch.tensor([base]), number), rate, True)


def kept(mask: Mask, tokens: int, width: int) -> Tensor:
    """Which elements of a tensor [tokens, width] the kernels keep, by ones."""
    return add(None, torch.ones(tokens, 1).half(), torch.ones(1, width).half(), mask) != 0


def random(*sizes: tuple[int, ...], dtype: torch.dtype = torch.float16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def close(found: Tensor, wanted: Tensor, limit: float) -> bool:
    return bool((found.double() - wanted).abs().max() <= limit * wanted.abs().max())


@pytest.mark.parametrize(("tokens", "width", "K"), SIZES)
def test_all_three_products_are_of_what_one_mask_leaves(launched, tokens, width, K):
    """In float16: the interpreter does not multiply bfloat16."""
    x, w, d_h, before = random((tokens, width), (K, width), (tokens, K), (tokens, width))
    mask, left = mask_of(7), kept(mask_of(7), tokens, width).double()
    assert 0.6 < left.mean() < 0.9
    # rows that are parts of longer ones
    wide = torch.cat([x, x[:, :3]], 1)[:, :width]
    h = times(wide, w, mask, 0.5, torch.float32)
    assert close(h, 0.5 * (x.double() * left) @ w.double().T, 1e-6)
    found = gradient(torch.cat([d_h, d_h], 1)[:, :K], wide, mask, torch.float32)
    assert close(found, d_h.double().T @ (x.double() * left), 1e-6)
    product = d_h.double() @ w.double() * left
    half = torch.finfo(torch.float16).eps
    assert close(add(None, d_h, w, mask), product, half)
    total = before.clone()
    assert add(total, d_h, w, mask) is total
    assert close(total, before.double() + product, half)
    assert launched >= KERNELS


def test_what_is_dropped_is_zero_but_not_a_number_stays():
    x, w = torch.full((70, 80), float("nan")).half(), torch.ones(2, 80).half()
    assert times(x, w, mask_of(7), 1.0, torch.float32).isnan().all()
    none = mask_of(7, rate=0.0), mask_of(7, rate=1 - 2**-24)
    assert kept(none[0], 70, 80).all() and not kept(none[1], 70, 80).any()


def test_masks_have_the_rate_and_know_nothing_of_each_other():
    """Of other seeds and numbers, and of neighbours in one mask; limits are five deviations."""
    drawn = mask_of(7), mask_of(8), mask_of(7, 5), mask_of(2**63 - 1, 2**20 + 1)
    masks = [kept(each, 192, 200).double() for each in drawn]
    count = masks[0].numel()
    deviation = (RATE * (1 - RATE) / count) ** 0.5
    centred = [mask - (1 - RATE) for mask in masks]
    shifts = [(by, dim) for by in (1, 2, 16, 32, 48, 64, 128) for dim in (0, 1)]
    for number, mask in enumerate(centred):
        assert abs(mask.mean()) < 5 * deviation
        for other in [*centred[:number], *(mask.roll(by, dim) for by, dim in shifts)]:
            covariance = (mask * other).mean() / (RATE * (1 - RATE))
            assert abs(covariance) < 5 / count**0.5


def in_half(monkeypatch):
    """Let fp32 adapters be split as on a GPU, and bfloat16 be multiplied as float16."""
    for module in (lora, lora_products):
        monkeypatch.setattr(module, "on_tensor_cores", lambda x: True)
    monkeypatch.setattr(lora_products, "wide_product", lambda x, w: x.float() @ w.float())

    def multiplied(run, *given):
        found = run(*[x.half() if isinstance(x, Tensor) else x for x in given])
        return found.to(given[1].dtype) if found.dtype == torch.float16 else found

    for name, module in (("times", lora_products), ("gradient", lora_products), ("add", lora)):
        monkeypatch.setattr(module, name, partial(multiplied, getattr(dropped_products, name)))


@pytest.mark.parametrize("dtypes", [(torch.float16,) * 2, (torch.bfloat16, torch.float32)], ids=str)
def test_layers_with_dropout_are_those_of_their_masks(monkeypatch, launched, dtypes):
    """Two layers that read one tensor, each with a mask of its own, values and gradients."""
    in_half(monkeypatch)
    dtype, of_adapters = dtypes
    seeds = [Seed(torch.tensor([5]), number) for number in (3, 5)]
    drawn = iter(seeds)
    monkeypatch.setattr(lora, "draw_seed", lambda device: next(drawn))
    x, *weights = random((130, 96), (80, 96), (72, 96), dtype=dtype)
    As = random((16, 96), (16, 96), dtype=of_adapters)
    Bs = random((80, 16), (72, 16), dtype=of_adapters)
    leaves = [each.requires_grad_() for each in (x, *As, *Bs)]
    layers = [
        LoraLinear(weight, (Adapter(A, B, 0.5, RATE),))
        for weight, A, B in zip(weights, As, Bs, strict=True)
    ]
    outs = fused(x, *layers, backend="triton")
    d_outs = random(*(out.shape for out in outs), dtype=dtype)
    found = torch.autograd.grad(outs, leaves, d_outs)
    wide = [each.detach().double().requires_grad_() for each in leaves]
    masks = [kept(Mask(seed, RATE, True), 130, 96).double() / (1 - RATE) for seed in seeds]
    wanted = [
        wide[0] @ weight.double().T + 0.5 * (wide[0] * mask) @ A.T @ B.T
        for weight, mask, A, B in zip(weights, masks, wide[1:3], wide[3:], strict=True)
    ]
    for out, exact in zip(outs, wanted, strict=True):
        assert close(out, exact, 1e-2)
    exact = torch.autograd.grad(wanted, wide, [each.double() for each in d_outs])
    for name, one, other in zip("x A A B B".split(), found, exact, strict=True):
        assert close(one, other, 2e-2), name
    # of another mask the error would be a multiple of that
    swapped = [*exact[:1], *exact[2:0:-1], *exact[3:]]
    assert not close(found[1], swapped[1], 0.2)
    assert launched >= KERNELS


@pytest.mark.parametrize("dtypes", [(torch.float16,) * 2, (torch.bfloat16, torch.float32)], ids=str)
def test_masks_of_high_ranks_are_drawn_before_the_products(monkeypatch, launched, dtypes):
    """All three products by one mask all the same: the tiles of more columns would not fit."""
    in_half(monkeypatch)
    monkeypatch.setattr(dropped_products, "WIDEST", 47)
    monkeypatch.setattr(dropout, "_on_a_gpu", lambda x: True)
    dtype, of_adapters = dtypes
    rank = 48 if of_adapters == torch.float16 else 16
    x, weight = random((70, 96), (80, 96), dtype=dtype)
    A, B = random((rank, 96), (80, rank), dtype=of_adapters)
    leaves = [each.requires_grad_() for each in (x, A, B)]
    monkeypatch.setattr(lora, "draw_seed", lambda device: Seed(torch.tensor([5]), 3))
    (out,) = fused(x, LoraLinear(weight, (Adapter(A, B, 0.5, RATE),)), backend="triton")
    (d_out,) = random(out.shape, dtype=dtype)
    found = torch.autograd.grad(out, leaves, d_out)
    mask = dropout.drop(torch.ones(70, 96), Seed(torch.tensor([5]), 3), RATE).double()
    wide = [each.detach().double().requires_grad_() for each in leaves]
    dropped = wide[0] * mask / (1 - RATE)
    wanted = wide[0] @ weight.double().T + 0.5 * dropped @ wide[1].T @ wide[2].T
    assert close(out, wanted, 1e-2)
    exact = torch.autograd.grad(wanted, wide, d_out.double())
    for name, one, other in zip("x A B".split(), found, exact, strict=True):
        assert close(one, other, 2e-2), name
    assert "drop_out" in launched and not launched & KERNELS
