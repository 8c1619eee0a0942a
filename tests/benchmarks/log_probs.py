"""Log-probabilities of given tokens, and their entropy, from hidden states: ours beside TRL's
chunked function, Liger's and cut-cross-entropy; and the cross entropy beside Liger's two.

    python -m tests.benchmarks.log_probs --out DIR [--only REGEX] [--minutes 9]
    python -m tests.benchmarks.log_probs --out DIR --device cpu --tiny      # a trial of the script itself

bf16, forward and backward ("ms"); "peak_gib" has inputs, weight and gradients in it. Every token
has a target and a gradient of its own, as a policy's loss gives it; "uniform": one for all, as a
mean has it. "entropy logged": returned without a gradient. "error": relative RMS of x's gradient
against fp32 logits, of the first tokens. Rows go to DIR/log_probs.jsonl; a package that is not
there is a row with its error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_packfree.ops.loss import Expected, Wanted, linear_cross_entropy, linear_log_probs
from tests.benchmarks.machine import machine
from tests.benchmarks.timing import Clock, Results, parser_of
from tests.support import relative_rms

SHAPES = {"8k": (8192, 248320, 2048), "32k": (32768, 248320, 2048)}
TINY = {"tiny": (300, 500, 32)}
KINDS = ("log p", "log p, entropy logged", "log p and entropy", "uniform log p")
CHECKED = 256
Scores = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""x [T, D], weight [V, D] and targets [T] to log-probabilities [T] and entropies [T]."""


def main() -> None:
    """Time the chosen rows."""
    options = parser_of(__doc__, minutes=9).parse_args()
    results = Results(options.out / "log_probs.jsonl", minutes=options.minutes, only=options.only)
    results.add({"workload": "machine", "variant": "", **machine(options.device)})
    clock = Clock(options.device, least=0.4, longest=0.8)
    for name, shape in (TINY if options.tiny else SHAPES).items():
        for who, loss in losses(clock.device):
            results.row(f"sft-loss-{name}", who, partial(_measure_loss, loss, clock, shape))
        results.row(
            f"rl-logprobs-{name}", "matrix products alone", partial(_products, clock, shape)
        )
        for kind in KINDS:
            for trained in (False, True):
                for who, scores in variants(kind, clock.device):
                    variant = f"{who}, {'trained' if trained else 'frozen'}, {kind}"
                    measure = partial(_measure, scores, clock, shape, kind, trained)
                    results.row(f"rl-logprobs-{name}", variant, measure)


def variants(kind: str, device: str) -> Iterator[tuple[str, Callable[[], Scores]]]:
    """Yield names and what loads each; not those that have no entropy where one is wanted."""
    yield "packfree", partial(_ours, kind, "triton" if device == "cuda" else "torch")
    yield "TRL", partial(_trls, kind)
    yield "Liger", partial(_ligers, kind)
    if "entropy" not in kind:
        yield "cut-cross-entropy", partial(_cut, None)
        yield "cut-cross-entropy, small gradients left out", partial(_cut, "high")


def _ours(kind: str, backend: str) -> Scores:
    wanted = Wanted(entropy="entropy" in kind)
    # what comes corrects it, as it does in a model
    expected = Expected(uniform="uniform" in kind, entropy="and entropy" in kind)

    def scores(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        found = linear_log_probs(
            x, weight, targets, wanted=wanted, expected=expected, backend=backend
        )
        return found.log_probs, found.entropy

    return scores


def _trls(kind: str) -> Scores:
    from trl.kernels import ChunkedLogProbFunction

    outputs = ("log_probs", *(["entropy"] if "entropy" in kind else []))
    return lambda x, weight, targets: ChunkedLogProbFunction.apply(
        x, weight, None, targets, 1.0, 32768, None, 1.0, outputs
    )[:2]


def _ligers(kind: str) -> Scores:
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Function

    def scores(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        found = Function.apply(x, weight, targets, 1.0, -100, 1, "entropy" in kind)
        return (-found[0], found[1]) if "entropy" in kind else (-found, None)

    return scores


def _cut(filter_eps: str | None) -> Scores:
    from cut_cross_entropy import linear_cross_entropy

    return lambda x, weight, targets: (
        -linear_cross_entropy(x, weight, targets, reduction="none", filter_eps=filter_eps),
        None,
    )


def losses(device: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield names and what loads each: a mean cross entropy."""

    def ours() -> Any:
        backend = "triton" if device == "cuda" else "torch"
        return lambda x, weight, targets: (
            linear_cross_entropy(x, weight, targets, backend=backend) / len(targets)
        )

    def ligers() -> Any:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss()
        return lambda x, weight, targets: loss(weight, x, targets)

    def ligers_for_hopper() -> Any:
        from liger_kernel.ops.cutedsl.ops import fused_linear_cross_entropy_sm90 as kernels

        return kernels.LigerFusedLinearCrossEntropySM90Function.apply

    yield "packfree", ours
    yield "Liger", ligers
    yield "Liger, kernels for Hopper", ligers_for_hopper


def _inputs(
    device: str, shape: tuple[int, int, int], trained: bool
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    (tokens, words, size), dtype = shape, torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(tokens, size, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(words, size, device=device, dtype=dtype) * 0.02).requires_grad_(trained)
    return x, weight, torch.randint(0, words, (tokens,), device=device)


def _given(kind: str, tokens: int, device: str) -> list[Tensor]:
    """Return the gradients of log-probabilities and entropies."""
    generator = torch.Generator(device).manual_seed(1)
    one, other = (torch.randn(tokens, generator=generator, device=device) for _ in range(2))
    if "uniform" in kind:
        return [torch.full_like(one, -1 / tokens)]
    return [one / tokens, other / tokens] if "and entropy" in kind else [one / tokens]


def _measure(
    load: Callable[[], Scores],
    clock: Clock,
    shape: tuple[int, int, int],
    kind: str,
    trained: bool,
) -> dict[str, Any]:
    scores, (x, weight, targets) = load(), _inputs(clock.device, shape, trained)
    given = _given(kind, len(x), clock.device)

    def step() -> Any:
        x.grad = weight.grad = None
        outputs = [one for one in scores(x, weight, targets) if one is not None][: len(given)]
        torch.autograd.backward(outputs, [one.to(out.dtype) for one, out in zip(given, outputs)])

    found = clock.measure(step)
    assert x.grad is not None
    best = _reference(x, weight, targets, given)
    return found | {
        "real_tokens_per_s": len(x) / found["ms"] * 1e3,
        "error": relative_rms(x.grad[:CHECKED], best),
    }


def _reference(x: Tensor, weight: Tensor, targets: Tensor, given: list[Tensor]) -> Tensor:
    """Return the gradient of the first tokens from logits in fp32."""
    part = x.detach()[:CHECKED].float().requires_grad_()
    log_p = (part @ weight.detach().float().t()).log_softmax(1)
    chosen = log_p.gather(1, targets[:CHECKED, None])[:, 0]
    outputs = [chosen, -(log_p.exp() * log_p).sum(1)][: len(given)]
    (found,) = torch.autograd.grad(outputs, part, [one[:CHECKED] for one in given])
    return found


def _measure_loss(
    load: Callable[[], Any], clock: Clock, shape: tuple[int, int, int]
) -> dict[str, Any]:
    loss, (x, weight, targets) = load(), _inputs(clock.device, shape, True)

    def step() -> Tensor:
        x.grad = weight.grad = None
        found: Tensor = loss(x, weight, targets)
        found.backward()
        return found.detach()

    found = clock.measure(step)
    return found | {"real_tokens_per_s": len(x) / found["ms"] * 1e3, "loss": float(step())}


def _products(clock: Clock, shape: tuple[int, int, int], rows: int = 4096) -> dict[str, Any]:
    """One product of the size of the logits, `rows` tokens at a time."""
    x, weight, _ = _inputs(clock.device, shape, False)

    @torch.no_grad()
    def step() -> None:
        for part in x.split(rows):
            part @ weight.t()

    found = clock.measure(step)
    return found | {"real_tokens_per_s": len(x) / found["ms"] * 1e3}


if __name__ == "__main__":
    main()
