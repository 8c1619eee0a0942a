"""One long document by itself: the delta rule whole and in segments, and attention by everything
that torch can activate.

    python -m tests.benchmarks.long_documents --out DIR [--only REGEX] [--minutes 8]
    python -m tests.benchmarks.long_documents --out DIR --device cpu --tiny      # a trial of the script itself

bf16, ms of forward ("forward_ms") and of forward and backward together ("ms"); rows go to
DIR/long_documents.jsonl. "segments, planned" is what a model runs; "n segments" are other cuts;
"parts" times the steps of the planned cut one by one. "bounded" rows are those of CUDA graphs, and
replayed in one: documents whole, and cut after so many chunks. Errors are of bf16 against fp64,
relative RMS of values and of the worst gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_packfree.graphs.bucket import bucket_of, in_bucket
from hf_packfree.ops.attention import attention, cudnn
from hf_packfree.ops.backend import BATCH_INVARIANT
from hf_packfree.ops.delta_rule import gated_delta_rule
from hf_packfree.ops.delta_rule.even_segments import cut_evenly
from hf_packfree.ops.delta_rule.flash_qla_segments import FlashQLAScans, parallel_segments
from hf_packfree.ops.delta_rule.segments import Segments, fold, plan_segments, walk_segments
from hf_packfree.ops.delta_rule.torch_chunked import TorchScans
from hf_packfree.ops.fla_support import CHUNK
from hf_packfree.packing import PackedSequence
from tests.benchmarks.timing import Clock, Results, parser_of
from tests.support import relative_rms

CUTS = (6, 8, 16, 24, 32)
# documents of the rows of CUDA graphs, in tokens
BOUNDED = tuple(
    row
    for tokens in (2048, 4096, 8192)
    for row in ((tokens,), (tokens // 2 + 100, tokens // 2 - 100), (tokens // 8,) * 8)
)
SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def main() -> None:
    """Time the chosen rows."""
    options = parser_of(__doc__, minutes=8).parse_args()
    results = Results(
        options.out / "long_documents.jsonl", minutes=options.minutes, only=options.only
    )
    clock = Clock(options.device, least=0.4, longest=4.0)
    if options.tiny:
        delta_rule(results, clock, 256, 1, 2, 16)
        full_attention(results, clock, 256, 2, 1, 16)
        bounded(results, clock, (512, 64), 1, 2, 16)
        return errors(results, clock.device, 300, 1, 2, 16)
    for tokens in (32768, 131072):
        delta_rule(results, clock, tokens, 16, 16, 128)
        full_attention(results, clock, tokens, 8, 2, 256)
    errors(results, clock.device, 8192, 16, 16, 128)
    for tokens in (65536, 16384, 8192, 4096):
        delta_rule(results, clock, tokens, 16, 16, 128)
    full_attention(results, clock, 65536, 8, 2, 256)
    for lengths in BOUNDED:
        bounded(results, clock, lengths, 16, 16, 128)
    # whose kernels TileLang compiles anew: minutes
    delta_rule(results, clock, 32768, 16, 32, 128)
    for lengths in BOUNDED:
        bounded(results, clock, lengths, 16, 32, 128)


def leaves_of(
    device: str, tokens: int, heads: int, values: int, size: int, dtype: torch.dtype
) -> list[Tensor]:
    """q, k, v, g, beta as a layer has them, with slow decay."""
    torch.manual_seed(0)
    q, k = (
        F.normalize(torch.randn(1, tokens, heads, size, device=device), dim=-1).to(dtype)
        for _ in range(2)
    )
    v = torch.randn(1, tokens, values, size, device=device).to(dtype)
    g = -0.01 * torch.rand(1, tokens, values, device=device)
    beta = torch.randn(1, tokens, values, device=device).sigmoid().to(dtype)
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


def delta_rule(
    results: Results, clock: Clock, tokens: int, heads: int, values: int, size: int
) -> None:
    """Time it on one document."""
    workload, on_gpu = f"delta rule {heads}/{values}, {tokens}", clock.device == "cuda"
    packed = PackedSequence.from_lengths([tokens], device=clock.device)
    leaves = leaves_of(
        clock.device, tokens, heads, values, size, torch.bfloat16 if on_gpu else torch.float32
    )
    rule = partial(gated_delta_rule, *leaves, packed, qk_l2norm=False)
    backends = ("flash_qla", "fla") if on_gpu else ("torch",)
    calls: dict[str, Callable[[], Tensor]] = {
        f"{name}, whole": partial(rule, backend=name + BATCH_INVARIANT) for name in backends
    }
    scans = FlashQLAScans() if on_gpu else TorchScans()
    plans = {f"{cut} segments": even(packed, cut) for cut in CUTS if tokens >= cut * 4 * CHUNK}
    planned = (
        plan_segments(packed, parallel_segments(leaves[0], values)) if on_gpu else even(packed, 2)
    )
    plans |= {} if planned is None else {"segments, planned": planned}
    for name, plan in plans.items():
        calls[f"{name} ({plan.record.num_segments})"] = partial(walk_segments, *leaves, plan, scans)
    for name, call in calls.items():
        time_both(results, clock, workload, name, call, leaves, tokens)
    if planned is not None:
        results.row(workload, "parts", partial(parts, clock, leaves, planned, scans))


def bounded(
    results: Results,
    clock: Clock,
    lengths: tuple[int, ...],
    heads: int,
    values: int,
    size: int,
) -> None:
    """Time it on a bounded row, its documents whole and cut after so many chunks."""
    on_gpu, row = clock.device == "cuda", PackedSequence.from_lengths(lengths, device=clock.device)
    workload = f"bounded, delta rule {heads}/{values}, {len(lengths)} of {max(lengths)}"
    packed, dtype = in_bucket(row, bucket_of(row)), torch.bfloat16 if on_gpu else torch.float32
    leaves = leaves_of(clock.device, packed.num_tokens, heads, values, size, dtype)
    scans = FlashQLAScans() if on_gpu else TorchScans()
    backend = "flash_qla" + BATCH_INVARIANT if on_gpu else "torch"
    calls: dict[str, Callable[[], Tensor]] = {
        "whole": partial(gated_delta_rule, *leaves, packed, qk_l2norm=False, backend=backend)
    }
    for chunks in (4, 8, 16, 32):
        if 2 * chunks * CHUNK <= max(lengths):
            plan = Segments(*packed.cached(cut_evenly, chunks))
            calls[f"{chunks} chunks"] = partial(walk_segments, *leaves, plan, scans)
    for name, call in calls.items():
        results.row(workload, name, partial(replayed, clock, call, leaves))


def replayed(clock: Clock, call: Callable[[], Tensor], leaves: list[Tensor]) -> dict[str, Any]:
    """Time forward and backward of `call` in a CUDA graph; on a CPU, by themselves."""
    gradient = torch.randn_like(call())

    def both() -> Any:
        return torch.autograd.grad(call(), leaves, gradient)

    if clock.device == "cpu":
        return clock.measure(both)
    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    return clock.measure(graph.replay)


def even(packed: PackedSequence, cut: int) -> Segments:
    """Cut a document in so many segments."""
    step = -(-packed.num_tokens // (cut * CHUNK)) * CHUNK
    whole, rest = divmod(packed.num_tokens, step)
    return Segments.of(packed, [[step] * whole + [rest] * (rest > 0)])


def parts(clock: Clock, leaves: list[Tensor], segments: Segments, scans: Any) -> dict[str, Any]:
    """Return the ms of every step."""
    with torch.no_grad():
        saved = scans.prepare(*leaves, segments)
        transition, addend = scans.summarize(saved, segments)
        before = fold(transition, addend, None, segments.firsts)
        out = scans.walk(saved, before, segments)
        d_out = torch.randn_like(out)
        back = scans.summarize_gradient(saved, d_out, segments)
        after = fold(transition, back, None, segments.firsts, reverse=True)
        steps: dict[str, Callable[[], Any]] = {
            "prepare": partial(scans.prepare, *leaves, segments),
            "summarize": partial(scans.summarize, saved, segments),
            "fold": partial(fold, transition, addend, None, segments.firsts),
            "walk": partial(scans.walk, saved, before, segments),
            "summarize_gradient": partial(scans.summarize_gradient, saved, d_out, segments),
            "walk_back": partial(scans.walk_back, saved, before, d_out, after, segments),
        }
        found = {name: clock.measure(step)["ms"] for name, step in steps.items()}
    return {
        "ms": sum(found.values()) + found["fold"],
        "parts_ms": found,
        "segments": list(segments.record.lengths),
    }


def full_attention(
    results: Results, clock: Clock, tokens: int, heads: int, keys: int, size: int
) -> None:
    """Time it on one document; TFLOP/s count two products forward and five backward, of half a
    square.
    """
    workload, on_gpu = f"attention {heads}/{keys} of {size}, {tokens}", clock.device == "cuda"
    packed = PackedSequence.from_lengths([tokens], device=clock.device)
    dtype, product = torch.bfloat16 if on_gpu else torch.float32, 2 * tokens**2 * heads * size
    shapes = ((1, tokens, count, size) for count in (heads, keys, keys))
    q, k, v = leaves = [
        torch.randn(shape, device=clock.device, dtype=dtype).requires_grad_() for shape in shapes
    ]
    backends = ("triton", "varlen") if on_gpu else ("torch",)
    calls: dict[str, Callable[[], Tensor]] = {
        name: partial(attention, q, k, v, packed, backend=name) for name in backends
    }
    calls |= {"cudnn": partial(cudnn.attend, q, k, v, packed)} if on_gpu else {}
    calls |= (
        {f"sdpa, {name}": partial(dense, q, k, v, backend) for name, backend in SDPA.items()}
        if on_gpu
        else {}
    )
    for name, call in calls.items():
        time_both(results, clock, workload, name, call, leaves, tokens, flops=product)
    for name in activated() if on_gpu else ():
        time_both(
            results,
            clock,
            workload,
            f"varlen, {name}",
            calls["varlen"],
            leaves,
            tokens,
            flops=product,
        )


def dense(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Tensor:
    """One causal document in torch's dense attention."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
        ).transpose(1, 2)


def activated() -> Iterator[str]:
    """Yield the name of each implementation that torch can activate here, while it is active."""
    from torch.nn import attention as implementations

    for name in getattr(implementations, "list_flash_attention_impls", list)():
        try:
            implementations.activate_flash_attention_impl(name)
        except Exception as error:
            # its package is missing
            print(f"{name} cannot be activated: {type(error).__name__}: {error}", flush=True)
        else:
            yield name
            implementations.restore_flash_attention_impl()


def time_both(
    results: Results,
    clock: Clock,
    workload: str,
    name: str,
    call: Callable[[], Tensor],
    leaves: list[Tensor],
    tokens: int,
    *,
    flops: float = 0.0,
) -> None:
    """Write the row of a function of `leaves`; `flops`: of its forward pass."""

    def measure() -> dict[str, Any]:
        gradient = torch.randn_like(call())
        with torch.no_grad():
            forward = clock.measure(call)["ms"]
        both = clock.measure(lambda: torch.autograd.grad(call(), leaves, gradient))
        rates = (
            {"forward_tflops": flops / forward / 1e9, "tflops": 3.5 * flops / both["ms"] / 1e9}
            if flops
            else {}
        )
        return both | {
            "forward_ms": forward,
            "real_tokens_per_s": tokens / both["ms"] * 1e3,
            **rates,
        }

    results.row(workload, name, measure)


def errors(results: Results, device: str, tokens: int, heads: int, values: int, size: int) -> None:
    """Write how far the delta rule on one document is from fp64, whole and in segments."""
    packed, on_gpu = PackedSequence.from_lengths([tokens], device=device), device == "cuda"
    inputs = leaves_of(
        device, tokens, heads, values, size, torch.bfloat16 if on_gpu else torch.float32
    )
    scans = FlashQLAScans() if on_gpu else TorchScans()

    def run(call: Callable[..., Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
        leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
        out = call(*leaves)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(
            device, out.dtype
        )
        return [out.detach(), *torch.autograd.grad(out, leaves, weight)]

    def against() -> list[Tensor]:
        return run(lambda *x: gated_delta_rule(*x, packed, qk_l2norm=False), torch.float64)

    wanted: list[list[Tensor]] = []
    backend = "flash_qla" if on_gpu else "torch"
    whole = partial(
        gated_delta_rule, packed=packed, qk_l2norm=False, backend=backend + BATCH_INVARIANT
    )
    calls: dict[str, Callable[..., Tensor]] = {"whole": whole}
    for cut in (8, 16):
        calls[f"{cut} segments"] = partial(
            lambda plan, *x: walk_segments(*x, plan, scans), even(packed, cut)
        )
    for name, call in calls.items():

        def measure(call: Callable[..., Tensor] = call) -> dict[str, Any]:
            wanted[:] = wanted or [against()]
            found = [relative_rms(a, b) for a, b in zip(run(call), wanted[0], strict=True)]
            return {
                "values": found[0],
                "gradients": dict(zip(("q", "k", "v", "g", "beta"), found[1:], strict=True)),
            }

        results.row(f"delta rule, errors, {tokens}", name, measure)


if __name__ == "__main__":
    main()
