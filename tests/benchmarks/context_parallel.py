"""Training steps of rows that several GPUs share, beside one GPU's.

    torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.context_parallel --out DIR   # measured; any number of GPUs
    python -m tests.benchmarks.context_parallel --out DIR [--worlds 2 4 8]                    # predicted, from one GPU
    python -m tests.benchmarks.context_parallel --out DIR --gradients                         # two processes of one GPU
    ... --device cpu --tiny                                                                   # a trial of the script itself

A step is forward, loss and backward of the whole model in bf16, without optimizer and without the sum of gradients over ranks,
which data parallelism has too.  "ms" and "peak_gib" are the slowest and the fullest rank's, "received_gib" and "exchanges" what
one rank receives in a step, "efficiency" is one GPU's ms over W times theirs.

"ranks": "predicted" rows are no measurement of several GPUs: one GPU runs each rank's part with copies on the device in the
place of exchanges, and the bytes at an assumed rate are added, nothing overlapping.  Under torchrun the rate is measured, and
the same prediction stands beside what was measured.  "fla" rows run flash-linear-attention's own context parallelism of the
delta rule, whose exchanges are not counted.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_packfree import apply_patches, remove_patches
from hf_packfree.parallel import ContextParallel
from tests.benchmarks.batches import Load
from tests.benchmarks.exchanges import LATENCY, RATE, Alone, Counted, exchanging, gather
from tests.benchmarks.fla_context_parallel import fla_for_states
from tests.benchmarks.machine import machine
from tests.benchmarks.models import build, free, what_runs
from tests.benchmarks.shapes import SHAPES, Shape, fixed_lengths
from tests.benchmarks.timing import Clock, Results, name_of, read_lines


@dataclass(frozen=True)
class Case:
    """One row of tokens.

    Attributes:
        name: of the workload, without the number of ranks.
        shape: the model.
        documents: "8k documents" or "one document".
        lengths: in tokens.
        checkpointing: whether layers are recomputed, on one GPU as on several.
    """

    name: str
    shape: Shape
    documents: str
    lengths: tuple[int, ...]
    checkpointing: bool

    def step(self, model: Any, device: str) -> Callable[[], Tensor]:
        """Return the step that is timed."""
        inputs = Load(self.lengths).inputs(model.config.get_text_config().vocab_size, device)
        labels, targets = inputs["input_ids"], sum(self.lengths) - len(self.lengths)

        def step() -> Tensor:
            model.zero_grad(set_to_none=True)
            loss: Tensor = model(**inputs, labels=labels, num_items_in_batch=targets, use_cache=False).loss
            loss.backward()
            return loss.detach()

        return step


def cases(tiny: bool) -> list[Case]:
    """Return the rows, the important ones first."""
    names = {"2b": "tiny" if tiny else "2b", "9b": "tiny" if tiny else "9b"}
    sizes = {"64k": 512, "128k": 1024, "256k": 2048} if tiny else {"64k": 2**16, "128k": 2**17, "256k": 2**18}
    found = []
    for shape, size in (("2b", "64k"), ("2b", "128k"), ("9b", "64k"), ("9b", "128k"), ("2b", "256k"), ("9b", "256k")):
        tokens = sizes[size]
        for documents, length in {"8k documents": tokens // (tokens // 60) if tiny else 8000, "one document": tokens}.items():
            lengths = tuple(fixed_lengths(tokens, length))
            found.append(Case(f"{shape}-{size}", SHAPES[names[shape]], documents, lengths, size != "64k"))
        if (shape, size) == ("2b", "128k"):  # which one GPU does not hold
            found.append(replace(found[-2], documents="8k documents, nothing recomputed", checkpointing=False))
    return found


@dataclass
class Bench:
    """What all rows share: how they are timed, the ranks there are, and what an exchange takes."""

    clock: Clock
    backend: str
    rate: float = RATE
    latency: float = LATENCY

    @property
    def ranks(self) -> int:
        """How many processes run."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def timed(self, step: Callable[[], Any]) -> dict[str, Any]:
        """Return "ms" and "peak_gib", of the slowest and of the fullest rank; every rank makes as many steps.

        "step_gib" is what the step adds at most to what there was before it, which is the model.
        """
        on_gpu = self.clock.device == "cuda"
        before = torch.cuda.memory_allocated() / 2**30 if on_gpu else 0.0
        for _ in range(self.clock.warmup):
            step()
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(self.clock.runs):
            if self.ranks > 1:
                dist.barrier()
            times.append(self.clock.once(step))
        peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
        if not float(step()) < float("inf"):
            raise FloatingPointError("the step's loss is not finite")
        found = torch.tensor([statistics.median(times), peak], device=self.clock.device)
        if self.ranks > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX)
        ms, peak = found.tolist()
        return {"ms": ms, "peak_gib": peak, "step_gib": peak - before, "runs": len(times)}

    def measure_exchanges(self, sizes: tuple[int, ...] = (2**20, 2**24, 2**28)) -> dict[str, Any]:
        """Return GB/s that one rank receives, by MiB, and set `rate` and `latency` to what these say."""
        found: dict[str, dict[int, float]] = {}
        for size in sizes:
            parts = torch.zeros(self.ranks, size // self.ranks, dtype=torch.uint8, device=self.clock.device)
            out = torch.empty_like(parts)
            calls: dict[str, Callable[[], Any]] = {
                "all_to_all": lambda: dist.all_to_all_single(out, parts),
                "all_gather": lambda: gather(out.view(-1), parts[0]),
            }
            for name, call in calls.items():
                found.setdefault(name, {})[size] = self.timed(partial(_ten_times, call, out))["ms"] / 1e4
        share, whole, (small, *_, large) = (self.ranks - 1) / self.ranks, found["all_to_all"], sizes
        self.rate = share * (large - small) / max(whole[large] - whole[small], 1e-9)
        self.latency = max(whole[small] - share * small / self.rate, 0.0)
        rates = {name: {size >> 20: share * size / s / 1e9 for size, s in one.items()} for name, one in found.items()}
        return {"gb_per_s": rates, "rate": self.rate, "latency_s": self.latency}


def _ten_times(call: Callable[[], Any], out: Tensor) -> Tensor:
    for _ in range(10):
        call()
    return out.flatten()[0]


@contextmanager
def sharing(model: nn.Module, settings: ContextParallel | None, bench: Bench) -> Iterator[dict[str, Any]]:
    """Patch a model for the ranks of a group, and undo it; what it runs on is in the dictionary."""
    apply_patches(model, backend=bench.backend, context_parallel=settings)
    try:
        yield what_runs(model)
    finally:
        remove_patches(model)
        model.zero_grad(set_to_none=True)
        free()


def one_gpu(bench: Bench, case: Case, model: nn.Module) -> dict[str, Any]:
    """Measure the whole row on one GPU."""
    with sharing(model, None, bench) as runs:
        return bench.timed(case.step(model, bench.clock.device)) | runs


def shared(bench: Bench, case: Case, model: nn.Module, gdn: str, how: Counted, one_ms: float | None) -> dict[str, Any]:
    """Measure a step of the ranks that there are, or of the one that `how` plays."""
    world = how.get_world_size()
    in_flas_way = fla_for_states() if gdn == "fla" else nullcontext()
    settings = ContextParallel(dist.group.WORLD if bench.ranks > 1 else None, gdn="state" if gdn == "fla" else gdn)
    with in_flas_way, exchanging(how), sharing(model, settings, bench) as runs:
        step = case.step(model, bench.clock.device)
        row = bench.timed(step) | runs
        how.reset()
        step()
    row |= {"ranks": "measured", "received_gib": how.received / 2**30, "exchanges": how.calls}
    return row | ({} if one_ms is None else {"efficiency": one_ms / (world * row["ms"])})


def predicted(bench: Bench, case: Case, model: nn.Module, gdn: str, world: int, one_ms: float | None) -> dict[str, Any]:
    """Run every kind of rank by itself, and add the time of its exchanges: the first, one amid others, and the last."""
    kinds = [0] if gdn == "heads" else sorted({0, world // 2, world - 1})
    rows = []
    for rank in kinds:
        how = Alone(rank, world)
        row = shared(bench, case, model, gdn, how, None)
        exchange = how.seconds(bench.rate, bench.latency) * 1e3
        rows.append(row | {"own_ms": row["ms"], "exchange_ms": exchange, "ms": row["ms"] + exchange})
    slowest = max(rows, key=lambda row: row["ms"])
    slowest |= {"ranks": "predicted", "peak_gib": max(row["peak_gib"] for row in rows), "ranks_run": kinds}
    slowest |= {"bytes_per_s": bench.rate, "exchange_latency_s": bench.latency}
    return slowest | ({} if one_ms is None else {"efficiency": one_ms / (world * slowest["ms"])})


def run_case(bench: Bench, case: Case, model: nn.Module, results: Results, worlds: list[int]) -> None:
    """Write a case's rows: one GPU's, then those of ranks by each way of exchanging."""
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
    facts = {"documents": len(case.lengths), "tokens": sum(case.lengths), "layers": case.shape.layers}
    facts |= {"recomputed": case.checkpointing, "note": case.shape.note()}

    def row(world: int, variant: str, measure: Callable[[], dict[str, Any]]) -> None:
        results.row(f"{case.name}-cp{world}", f"{case.documents}{variant}", lambda: facts | measure())

    row(1, "", lambda: one_gpu(bench, case, model))
    known = {name_of(found): found.get("ms") for found in read_lines(results.path)}
    one_ms = known.get((f"{case.name}-cp1", case.documents))
    for world in worlds:
        for gdn in ("state", "heads", "fla") if bench.ranks > 1 else ("state", "heads"):
            if bench.ranks > 1:
                row(world, f", {gdn}", lambda: shared(bench, case, model, gdn, Counted(), one_ms))
            if gdn != "fla":
                row(world, f", {gdn}, predicted", lambda: predicted(bench, case, model, gdn, world, one_ms))


def main() -> None:
    """Measure the chosen rows, or predict them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for context_parallel.jsonl")
    parser.add_argument("--only", default="", help="regular expression searched in 'workload variant'")
    parser.add_argument("--minutes", type=float, default=1e9, help="on one GPU, rows that would begin later are skipped")
    parser.add_argument("--worlds", type=int, nargs="*", default=[2, 4, 8], help="numbers of ranks to predict, on one GPU")
    parser.add_argument("--backend", default="auto", help="of apply_patches")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="tiny models and rows")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--resume", action="store_true", help="leave out rows that the file holds")
    parser.add_argument("--gradients", action="store_true", help="errors of gradients instead of times")
    options = parser.parse_args()
    if options.gradients:
        from tests.benchmarks.context_parallel_errors import measure_errors

        return measure_errors(options.out, options.device, options.tiny)
    bench = Bench(Clock(options.device, warmup=1, runs=options.runs), options.backend)
    with group_of(options.device) as rank:
        out = options.out / (f"rank{rank}" if rank else "") / "context_parallel.jsonl"
        minutes = 1e9 if bench.ranks > 1 else options.minutes  # by which ranks would not skip the same rows
        results = Results(out, minutes, options.only, resume=options.resume)
        results.add({"workload": "machine", "variant": "", **machine(options.device)})
        if bench.ranks > 1:
            sizes = (2**10, 2**14, 2**18) if options.tiny else (2**20, 2**24, 2**28)
            results.add({"workload": "exchanges", "variant": f"{bench.ranks} ranks", **bench.measure_exchanges(sizes)})
        run_all(bench, cases(options.tiny), results, [bench.ranks] if bench.ranks > 1 else options.worlds)


def run_all(bench: Bench, todo: list[Case], results: Results, worlds: list[int]) -> None:
    """Build each case's model, if the last one was another, and write the case's rows."""
    model, shape = None, None
    for case in todo:
        if results.late() or not any(results.wanted(f"{case.name}-cp{n}", case.documents) for n in (1, *worlds)):
            continue
        if case.shape != shape:
            model, shape = None, case.shape
            free()
            model = build(shape, bench.clock.device, torch.bfloat16 if bench.clock.device == "cuda" else torch.float32)
        run_case(bench, case, model, results, worlds)


@contextmanager
def group_of(device: str) -> Iterator[int]:
    """Join torchrun's group, if it started this process; yields the rank."""
    if "LOCAL_RANK" not in os.environ:
        yield 0
        return
    rank = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=datetime.timedelta(minutes=5))
    try:
        yield rank
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
