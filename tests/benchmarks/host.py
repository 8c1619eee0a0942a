"""What the host does to enqueue one layer, forward and backward: where a short step waits for it.

    python -m tests.benchmarks.host --out DIR [--only REGEX] [--minutes 4] [--tokens 2048]
    python -m tests.benchmarks.host --out DIR --device cpu --tiny      # a trial of the script itself

One layer of each kind of the 2B shape on a packed row, its plans made. "frames" and "c_calls" are
Python functions and functions in C called from Python, "dispatched" calls of torch's dispatcher,
those that operators make of others among them, "allocations" and "casts" some of these,
"nodes" what autograd keeps, "launches" our Triton kernels, "kernels" all. "host_ms" is from start
to return, with the GPU waiting for it; "behind_ms" with a GPU that is busy. "own_us" has the functions
that take the host longest themselves, under Python's profiler, which makes Python slower and not
what it calls; "frames_in" those that most calls are made in.
"""

from __future__ import annotations

import cProfile
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree.graphs.parts import nodes_of
from hf_packfree.ops import launch as launcher
from hf_packfree.packing import PackedSequence
from tests.benchmarks.machine import machine
from tests.benchmarks.models import Variant, variant_of
from tests.benchmarks.profiling import kernels_of
from tests.benchmarks.shapes import SHAPES, Shape, log_normal_lengths
from tests.benchmarks.timing import Results, parser_of
from tests.benchmarks.workloads import PACKFREE

VARIANTS = {"packfree": PACKFREE, "packfree, LoRA": Variant(lora="fp32")}
LAYERS = {"linear_attn": "Gated DeltaNet layer", "self_attn": "attention layer"}
RUNS = 50
# rows and columns of the product that keeps the GPU busy, some ms long
_BUSY = 8192


def steps(model: nn.Module, packed: PackedSequence) -> dict[str, Callable[[], None]]:
    """Return {name: forward and backward of a layer}, one for each kind."""
    trunk: Any = model.get_submodule("model") if hasattr(model, "model") else model
    weight = trunk.get_input_embeddings().weight
    x = torch.randn(
        1, packed.num_tokens, weight.shape[1], device=weight.device, dtype=weight.dtype
    ).requires_grad_()
    positions = packed.position_ids()
    given = {
        "position_embeddings": trunk.rotary_emb(x, positions),
        "position_ids": positions,
        "packed_sequence": packed,
    }
    found = {}
    for layer in trunk.layers:
        name = next(name for mixer, name in LAYERS.items() if hasattr(layer, mixer))
        parameters = tuple(layer.parameters())
        found.setdefault(name, partial(_step, layer, x, given, torch.randn_like(x), parameters))
    return found


def _step(
    layer: nn.Module,
    x: Tensor,
    given: dict[str, Any],
    d_out: Tensor,
    parameters: tuple[Tensor, ...],
) -> None:
    _forward(layer, x, given).backward(d_out)
    x.grad = None
    for parameter in parameters:
        parameter.grad = None


def _forward(layer: nn.Module, x: Tensor, given: dict[str, Any]) -> Tensor:
    out: Tensor = layer(x, **given)
    return out


def own_time(step: Callable[[], None], runs: int = 20) -> dict[str, float]:
    """Return us of a step by function, what it calls not counted, the longest first."""
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        profiler.enable()
        for _ in range(runs):
            step()
        profiler.disable()
    found = Counter[str]()
    for entry in profiler.getstats():
        code: Any = entry.code
        name = code if isinstance(code, str) else f"{Path(code.co_filename).name}:{code.co_name}"
        found[name] += entry.inlinetime * 1e6 / runs
    return dict(found.most_common(40))


def count(step: partial[None], device: str) -> dict[str, Any]:
    """Return what the step calls, on one thread, and the nodes that autograd keeps."""
    frames, owners = Counter[str](), Counter[str]()

    def seen(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            frames[event] += 1
            code = frame.f_code
            owners[f"{Path(code.co_filename).name}:{code.co_name}"] += 1

    launches = _Launches()
    with torch.autograd.set_multithreading_enabled(False):
        with launches:
            step()
        sys.setprofile(seen)
        try:
            step()
        finally:
            sys.setprofile(None)
    operators = _operators(step)
    return {
        "frames": frames["call"],
        "c_calls": frames["c_call"],
        "dispatched": sum(operators.values()),
        "allocations": sum(n for name, n in operators.items() if name.startswith("aten::empty")),
        "casts": operators["aten::_to_copy"],
        "nodes": _nodes(_forward(*step.args[:3])),
        "launches": launches.count,
        "kernels": sum(calls for *_, calls in kernels_of(step, device)),
        "frames_in": dict(owners.most_common(25)),
        "operators": dict(operators.most_common(25)),
    }


class _Launches:
    """Counts launches of our Triton kernels within a block; none on a CPU, where references
    run.
    """

    count = 0

    def __enter__(self) -> None:
        self.launch = launcher._launch

        def counted(*arguments: Any) -> None:
            self.count += 1
            self.launch(*arguments)

        launcher._launch = counted

    def __exit__(self, *error: Any) -> None:
        launcher._launch = self.launch


def _operators(step: Callable[[], None]) -> Counter[str]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
    return Counter(
        {
            event.key: event.count
            for event in profiler.key_averages()
            if event.key.startswith("aten::")
        }
    )


def _nodes(out: Tensor) -> int:
    """The nodes that a backward pass runs, those of parameters not counted."""
    return sum("AccumulateGrad" not in node.name() for node in nodes_of(out))


def enqueue(step: Callable[[], None], device: str, *, busy: bool = False) -> float:
    """Return the median ms of the host from start to return, the GPU `busy` or waiting."""
    product = torch.ones(_BUSY, _BUSY, device=device, dtype=torch.bfloat16) if busy else None
    took = []
    for _ in range(RUNS if device == "cuda" else 3):
        if device == "cuda":
            torch.cuda.synchronize()
        if product is not None:
            for _ in range(4):
                torch.mm(product, product)
        began = time.perf_counter()
        step()
        took.append((time.perf_counter() - began) * 1e3)
    return median(took)


def measure(step: partial[None], device: str) -> dict[str, Any]:
    """Return a row of the table: times first, with nothing that counts."""
    for _ in range(3):
        step()
    times = {"host_ms": enqueue(step, device)}
    if device == "cuda":
        times["behind_ms"] = enqueue(step, device, busy=True)
    return times | count(step, device) | {"own_us": own_time(step)}


def rows(results: Results, shape: Shape, device: str, lengths: list[int]) -> None:
    """Write a row for each kind of layer and variant."""
    packed = PackedSequence.from_lengths(lengths, device=device)
    for variant, settings in VARIANTS.items():
        if not any(results.wanted(layer, variant) for layer in LAYERS.values()):
            continue
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        with variant_of(shape, settings, device, dtype) as model:
            for layer, step in steps(model, packed).items():
                results.row(layer, variant, partial(measure, step, device))


def main() -> None:
    """Measure and write `host.jsonl`."""
    parser = parser_of(__doc__, minutes=1e9)
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    results = Results(options.out / "host.jsonl", options.minutes, options.only)
    results.add({"workload": "machine", "variant": "", **machine(options.device)})
    lengths = log_normal_lengths(64 if options.tiny else options.tokens)
    # one of each kind is enough
    shape = replace(SHAPES["tiny" if options.tiny else "2b"], layers=4)
    rows(results, shape, options.device, lengths)


if __name__ == "__main__":
    main()
