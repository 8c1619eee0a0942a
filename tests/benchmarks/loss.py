"""A language model's head and its cross entropy alone: ours, Liger's and torch's, beside their
three matrix products; and of heads that divide or cap their logits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.benchmarks.timing import Clock, Results

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
CAP = 30.0
STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "logits divided": lambda logits: logits / 8.0,
    "logits capped": lambda logits: (logits / CAP).tanh() * CAP,
}
"""What heads do with their product, as Granite's and Gemma's do."""


def head_and_loss(results: Results, clock: Clock, tokens: int, words: int, size: int) -> None:
    """Write a row for each: forward and backward ("ms") of `tokens` with targets, `words` in the
    vocabulary, in bf16.

    "peak_gib" has inputs, weights and gradients in it.
    """
    workload = f"loss {tokens} x {words} x {size}"
    rows: dict[str, Callable[[], Loss]] = {
        "triton": partial(_ours, "triton"),
        "torch": partial(_ours, "torch"),
        "upstream": partial(_ours, "upstream"),
        "Liger": _ligers,
        "torch's linear_cross_entropy": partial(_torchs, "auto"),
        "torch's linear_cross_entropy, balanced": partial(_torchs, "balanced"),
    }
    for name, step in STEPS.items():
        rows[f"triton, {name}"] = partial(_ours_after, step, "triton")
        rows[f"upstream, {name}"] = partial(_upstreams_after, step)
    rows["Liger, logits capped"] = partial(_ligers, CAP)
    if clock.device == "cpu":
        rows = {name: row for name, row in rows.items() if not name.startswith(("triton", "Liger"))}
    results.row(workload, "matrix products alone", partial(_products, clock, tokens, words, size))
    for variant, load in rows.items():
        results.row(
            workload, variant, lambda load=load: _measure(load(), clock, tokens, words, size)
        )


def _ours(backend: str) -> Loss:
    from hf_packfree.ops.loss import linear_cross_entropy

    return lambda x, weight, targets: (
        linear_cross_entropy(x, weight, targets, backend=backend) / len(targets)
    )


def _ours_after(step: Callable[[Tensor], Tensor], backend: str) -> Loss:
    from tests.support import loss_after

    return lambda x, weight, targets: loss_after(step, x, weight, targets, backend) / len(targets)


def _upstreams_after(step: Callable[[Tensor], Tensor]) -> Loss:
    return lambda x, weight, targets: torch.nn.functional.cross_entropy(
        step(x @ weight.t()).float(), targets
    )


def _ligers(softcap: float | None = None) -> Loss:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(softcap=softcap)
    return lambda x, weight, targets: loss(weight, x, targets)


def _torchs(policy: str) -> Loss:
    options = torch.nn.LinearCrossEntropyOptions(acc_policy=policy)
    return partial(torch.nn.functional.linear_cross_entropy, options=options)


def _inputs(device: str, tokens: int, words: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(tokens, size, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(words, size, device=device, dtype=dtype) * 0.02).requires_grad_()
    return x, weight, torch.randint(0, words, (tokens,), device=device)


def _measure(loss: Loss, clock: Clock, tokens: int, words: int, size: int) -> dict[str, Any]:
    x, weight, targets = _inputs(clock.device, tokens, words, size)

    def step() -> Tensor:
        x.grad = weight.grad = None
        found = loss(x, weight, targets)
        found.backward()
        return found.detach()

    found = clock.measure(step)
    return found | {"real_tokens_per_s": tokens / found["ms"] * 1e3, "loss": float(step())}


def _products(clock: Clock, tokens: int, words: int, size: int, rows: int = 8192) -> dict[str, Any]:
    """Logits, and the gradients of x and of the weight, `rows` tokens at a time."""
    x, weight, _ = _inputs(clock.device, tokens, words, size)

    @torch.no_grad()
    def step() -> None:
        for part in x.split(rows):
            logits = part @ weight.t()
            logits @ weight, logits.t() @ part

    found = clock.measure(step)
    return found | {"real_tokens_per_s": tokens / found["ms"] * 1e3}
