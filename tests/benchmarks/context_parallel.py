"""Training steps of rows that several GPUs share, beside one GPU's.

    torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.context_parallel --out DIR   # measured; any number of GPUs
    python -m tests.benchmarks.context_parallel --out DIR [--worlds 2 4 8]                    # predicted, from one GPU
    python -m tests.benchmarks.context_parallel --out DIR --gradients                         # two processes of one GPU
    ... --device cpu --tiny                                                                   # a trial of the script itself

A step is forward, loss and backward of the whole model in bf16, without optimizer and without the
sum of gradients over ranks, which data parallelism has too. "ms" and "peak_gib" are the slowest and
the fullest rank's, "received_gib" and "exchanges" what one rank receives in a step, "efficiency" is
one GPU's ms over W times theirs, "loss" the whole row's, on which all ways have to agree.

"ranks": "predicted" rows are no measurement of several GPUs: one GPU runs each rank's part with
copies on the device in the place of exchanges, and the bytes at an assumed rate are added, nothing
overlapping. Under torchrun the rate is measured, and the same prediction stands beside what was
measured. "fla" rows, where it is installed, run flash-linear-attention's own context parallelism of
the delta rule, whose exchanges are not counted.

A rank that fails amid exchanges ends all processes, since others would wait for it: the same
command with --resume goes on behind that row.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from hf_packfree import MTPOptions, apply_patches, remove_mtp, remove_patches
from hf_packfree.parallel import ContextParallel
from tests.benchmarks.context_parallel_cases import Case, cases, small
from tests.benchmarks.context_parallel_ranks import Bench, group_of, results_of_ranks
from tests.benchmarks.exchanges import Alone, Counted, exchanging
from tests.benchmarks.fla_context_parallel import fla_for_states
from tests.benchmarks.machine import machine
from tests.benchmarks.models import what_runs
from tests.benchmarks.timing import Clock, Results, end_if_failed, free, name_of, read_lines


@contextmanager
def sharing(
    model: nn.Module, settings: ContextParallel | None, bench: Bench, case: Case
) -> Iterator[dict[str, Any]]:
    """Patch a model for the ranks of a group, and undo it; what it runs on is in the dictionary."""
    head = MTPOptions(from_scratch=True) if case.kind == "mtp" else None
    # a new head is the same every time, on all ranks
    torch.manual_seed(1)
    apply_patches(
        model, backend=bench.backend, context_parallel=settings, unpacked="native", mtp=head
    )
    try:
        yield what_runs(model)
    finally:
        if head is not None:
            remove_mtp(model)
        remove_patches(model)
        model.zero_grad(set_to_none=True)
        free()


def one_gpu(bench: Bench, case: Case, model: nn.Module) -> dict[str, Any]:
    """Measure the whole row on one GPU."""
    with sharing(model, None, bench, case) as runs:
        return bench.timed(case.step(model, bench.clock.device)) | runs


def shared(bench: Bench, case: Case, gdn: str, how: Counted, model: nn.Module) -> dict[str, Any]:
    """Measure a step of the ranks that there are, or of the one that `how` plays."""
    together = not isinstance(how, Alone)
    in_flas_way = fla_for_states() if gdn == "fla" else nullcontext()
    settings = ContextParallel(
        dist.group.WORLD if bench.ranks > 1 else None, gdn="state" if gdn == "fla" else gdn
    )
    with in_flas_way, exchanging(how), sharing(model, settings, bench, case) as runs:
        step = case.step(model, bench.clock.device)
        row = bench.timed(step, together=together, before_last=how.reset) | runs
        if gdn == "fla":
            row["implementations"] = runs["implementations"] | {"conv": "fla", "delta_rule": "fla"}
    if together:
        row["loss"] = bench.summed(row["loss"])
    else:
        del row["loss"]
    return row | {"ranks": "measured", "received_gib": how.received / 2**30, "exchanges": how.calls}


def predicted(bench: Bench, case: Case, gdn: str, world: int, model: nn.Module) -> dict[str, Any]:
    """Run every kind of rank by itself, and add the time of its exchanges: the first, one amid
    others, and the last.
    """
    kinds = [0] if gdn == "heads" else sorted({0, world // 2, world - 1})
    rows = []
    for rank in kinds:
        how = Alone(rank, world)
        row = shared(bench, case, gdn, how, model)
        exchange = how.seconds(bench.rate, bench.latency) * 1e3
        rows.append(
            row | {"own_ms": row["ms"], "exchange_ms": exchange, "ms": row["ms"] + exchange}
        )
    slowest = max(rows, key=lambda row: row["ms"])
    slowest |= {
        "ranks": "predicted",
        "peak_gib": max(row["peak_gib"] for row in rows),
        "ranks_run": kinds,
    }
    return slowest | {"bytes_per_s": bench.rate, "exchange_latency_s": bench.latency}


class Row(NamedTuple):
    """What is measured of a case: by how many GPUs, how, and whether this needs them all at
    once.
    """

    world: int
    variant: str
    measure: Callable[[nn.Module], dict[str, Any]]
    together: bool = False


def rows_of(bench: Bench, case: Case, worlds: list[int]) -> list[Row]:
    """Return a case's rows: one GPU's, then those of ranks by each way of exchanging."""
    found = [Row(1, case.documents, partial(one_gpu, bench, case))]
    for world in worlds:
        for gdn in bench.ways:
            name = f"{case.documents}, {gdn}"
            if bench.ranks > 1 and (gdn != "fla" or find_spec("fla")):
                found.append(
                    Row(world, name, partial(shared, bench, case, gdn, Counted()), together=True)
                )
            if gdn != "fla":
                found.append(
                    Row(world, f"{name}, predicted", partial(predicted, bench, case, gdn, world))
                )
    return found


def run_case(case: Case, rows: list[Row], model: nn.Module, results: Results) -> None:
    """Write a case's rows."""
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()

    def measured(row: Row) -> dict[str, Any]:
        found = case.facts() | row.measure(model)
        one = {name_of(line): line.get("ms") for line in read_lines(results.path)}.get(
            (f"{case.name}-cp1", case.documents)
        )
        return (
            found
            if row.world == 1 or one is None
            else found | {"efficiency": one / (row.world * found["ms"])}
        )

    for row in rows:
        results.row(f"{case.name}-cp{row.world}", row.variant, partial(measured, row))
        if row.together:
            end_if_failed(results)


def main() -> None:
    """Measure the chosen rows, or predict them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for context_parallel.jsonl")
    parser.add_argument(
        "--only", default="", help="regular expression searched in 'workload variant'"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=1e9,
        help="on one GPU, rows that would begin later are skipped",
    )
    parser.add_argument(
        "--worlds",
        type=int,
        nargs="*",
        default=[2, 4, 8],
        help="numbers of ranks to predict, on one GPU",
    )
    parser.add_argument(
        "--ways",
        nargs="*",
        default=["state", "fla"],
        choices=["state", "heads", "fla"],
        help="how Gated DeltaNet is shared; heads compile kernels of their own, for minutes",
    )
    parser.add_argument("--backend", default="auto", help="of apply_patches")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="tiny models and rows")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="leave out rows that the file holds")
    parser.add_argument(
        "--gradients", action="store_true", help="errors of gradients instead of times"
    )
    options = parser.parse_args()
    if options.gradients:
        from tests.benchmarks.context_parallel_errors import measure_errors

        ways = [way for way in options.ways if way != "fla"]
        return measure_errors(options.out, options.device, options.tiny, ways)
    clock = Clock(options.device, warmup=1, runs=options.runs)
    bench = Bench(clock, options.backend, tuple(options.ways))
    with group_of(options.device):
        # by which ranks would not skip the same rows
        minutes = 1e9 if bench.ranks > 1 else options.minutes
        results = results_of_ranks(
            options.out, "context_parallel", options.only, minutes=minutes, resume=options.resume
        )
        results.add({"workload": "machine", "variant": "", **machine(options.device)})
        if bench.ranks > 1:
            sizes = (2**10, 2**14, 2**18) if options.tiny else (2**20, 2**24, 2**28)
            results.add(
                {
                    "workload": "exchanges",
                    "variant": f"{bench.ranks} ranks",
                    **bench.measure_exchanges(sizes),
                }
            )
        run_all(
            bench,
            cases(options.tiny, small=small(options.device)),
            results,
            [bench.ranks] if bench.ranks > 1 else options.worlds,
        )


def run_all(bench: Bench, todo: list[Case], results: Results, worlds: list[int]) -> None:
    """Build each case's model, if the last one was another, and write the case's rows."""
    model, built = None, None
    for case in todo:
        rows = rows_of(bench, case, worlds)
        if results.late() or not any(
            results.wanted(f"{case.name}-cp{row.world}", row.variant) for row in rows
        ):
            continue
        if case.model != built:
            model, built = None, case.model
            free()
            model = case.built(bench.clock.device)
        run_case(case, rows, model, results)


if __name__ == "__main__":
    main()
