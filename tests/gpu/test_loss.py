"""Head and loss on the GPU: every backend against fp64, bf16 no farther from it than upstream's,
memory of one chunk.
"""

from __future__ import annotations

import pytest
import torch

from hf_packfree.ops.loss import chunked_loss, linear_cross_entropy
from tests.gpu.checks import DEVICE, TRIAL, gpu
from tests.gpu.small import NARROW, packed_row, small
from tests.support import loss_after, relative_rms

pytestmark = gpu
TOKENS, WORDS, SIZE = (300, 500, 64) if TRIAL else (9000, 50021, 512)
"""Words in an odd number: no block of the kernel fits, and no row of logits begins at a multiple
of 16 bytes.
"""
BACKENDS = ["torch"] if TRIAL else ["torch", "triton"]


def outcome(dtype, backend, kept=1.0):
    """The loss and its gradients, of values rounded to `dtype`'s half once."""
    torch.manual_seed(0)
    half = torch.bfloat16 if dtype == torch.float64 else dtype
    x, weight = (
        torch.randn(*shape, device=DEVICE).to(half).to(dtype)
        for shape in ((TOKENS, SIZE), (WORDS, SIZE))
    )
    x, weight = x.requires_grad_(), weight.mul_(4 * SIZE**-0.5).requires_grad_()
    targets = torch.randint(0, WORDS, (TOKENS,), device=DEVICE)
    targets = targets.masked_fill(torch.rand(TOKENS, device=DEVICE) >= kept, -100)
    loss = linear_cross_entropy(x, weight, targets, backend=backend) / 7000
    return [loss.detach(), *torch.autograd.grad(loss, [x, weight])]


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    monkeypatch.setattr(chunked_loss, "_ELEMENTS", {"cuda": 2048 * WORDS})


@pytest.mark.parametrize("kept", [1.0, 0.3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_fp32_equals_fp64(backend, kept, record, precise):
    torch.manual_seed(0)
    x, weight = (
        torch.randn(TOKENS, SIZE, device=DEVICE),
        torch.randn(WORDS, SIZE, device=DEVICE) * 4 * SIZE**-0.5,
    )
    targets = torch.randint(0, WORDS, (TOKENS,), device=DEVICE)
    targets = targets.masked_fill(torch.rand(TOKENS, device=DEVICE) >= kept, -100)
    found = {}
    for dtype, name in ((torch.float32, backend), (torch.float64, "upstream")):
        leaves = [one.to(dtype).detach().requires_grad_() for one in (x, weight)]
        loss = linear_cross_entropy(*leaves, targets, backend=name)
        found[name] = [loss.detach(), *torch.autograd.grad(loss, leaves)]
    for what, ours, wanted, limit in zip(
        ("loss", "x", "weight"), found[backend], found["upstream"], (1e-6, 1e-5, 1e-5)
    ):
        record(
            f"loss, {backend}: {what} in fp32 against fp64, {kept:.0%} with targets",
            relative_rms(ours, wanted),
            limit,
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_is_no_farther_from_fp32_than_upstream(backend, dtype, record):
    torch.manual_seed(0)
    x, weight = (
        torch.randn(TOKENS, SIZE, device=DEVICE).to(dtype),
        torch.randn(WORDS, SIZE, device=DEVICE).to(dtype) / 8,
    )
    targets, found = torch.randint(0, WORDS, (TOKENS,), device=DEVICE), {}
    for name, kind, wide in (
        ("ours", backend, dtype),
        ("upstream", "upstream", dtype),
        ("fp32", "upstream", torch.float64),
    ):
        leaves = [one.to(wide).detach().requires_grad_() for one in (x, weight)]
        loss = linear_cross_entropy(*leaves, targets, backend=kind) / (
            7000 if dtype == torch.bfloat16 else 0.1
        )
        found[name] = [loss.detach(), *torch.autograd.grad(loss, leaves)]
    for what, ours, upstream, best in zip(("loss", "x", "weight"), *found.values()):
        limit = max(1.05 * relative_rms(upstream, best), 1e-5)
        record(f"loss, {backend}: {what} in {dtype} against fp32", relative_rms(ours, best), limit)


HEADS = {"divided": lambda z: z / 8.0, "capped": lambda z: (z / 3.0).tanh() * 3.0}
"""As Granite's and Gemma's: the one's number is a power of two, the other's two are inverse."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_that_scale_or_cap_are_no_farther_from_fp32_than_upstream(
    backend, head, dtype, record
):
    """Of the loss, too: logits are rounded where upstream rounds them."""
    torch.manual_seed(0)
    x, weight = (
        torch.randn(*shape, device=DEVICE).to(dtype) for shape in ((TOKENS, SIZE), (WORDS, SIZE))
    )
    targets, step = torch.randint(0, WORDS, (TOKENS,), device=DEVICE), HEADS[head]
    found = {}
    for name in ("ours", "upstream", "fp32"):
        leaves = [
            one.to(torch.float64 if name == "fp32" else dtype).detach().requires_grad_()
            for one in (x, weight / 8)
        ]
        if name == "ours":
            loss = loss_after(step, *leaves, targets, backend)
        else:
            made = step(leaves[0] @ leaves[1].T)
            made = made if name == "fp32" else made.float()
            loss = torch.nn.functional.cross_entropy(made, targets, reduction="sum")
        loss = loss / (7000 if dtype == torch.bfloat16 else 0.1)
        found[name] = [loss.detach(), *torch.autograd.grad(loss, leaves)]
    for what, ours, upstream, best in zip(("loss", "x", "weight"), *found.values()):
        limit = max(1.05 * relative_rms(upstream, best), 1e-5)
        record(
            f"loss of logits {head}, {backend}: {what} in {dtype}", relative_rms(ours, best), limit
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_bits_twice(backend):
    dtype = torch.float32 if TRIAL else torch.bfloat16
    assert all(map(torch.equal, outcome(dtype, backend, 0.5), outcome(dtype, backend, 0.5)))


@pytest.mark.skipif(TRIAL, reason="CPU tensors are not counted")
def test_memory_is_that_of_one_chunk(record):
    outcome(torch.bfloat16, "triton")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outcome(torch.bfloat16, "triton")
    chunk, weight = 2 * 2048 * WORDS, 2 * WORDS * SIZE
    peak = torch.cuda.max_memory_allocated() - before
    record(
        "loss, triton: bytes over a chunk's logits and ten weights",
        peak / (chunk + 10 * weight),
        1.0,
    )


@pytest.mark.skipif(TRIAL, reason="CPU has no such mode")
def test_a_step_does_not_wait_for_the_count_of_targets():
    """Beyond what reading boundaries waits for: with the record given, nothing does."""
    model = small(NARROW)
    ids, packed = packed_row(model, (300, 700))
    for mode in ("default", "error"):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            model(
                input_ids=ids, labels=ids, packed_sequence=packed, use_cache=False
            ).loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
