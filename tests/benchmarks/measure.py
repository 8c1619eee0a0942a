"""Time training steps on a GPU, unpatched and patched, side by side in one process.

    python -m tests.benchmarks.measure --out DIR [--only REGEX] [--minutes M] [--profile]
    python -m tests.benchmarks.measure --out DIR --device cpu --tiny          # a trial of the script itself

A step is the trunk's forward and backward, bf16, without optimizer. Each row is appended to
DIR/rows.jsonl when it is known. `--only` is searched in "workload variant".
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hf_packfree import patch_report
from tests.benchmarks.batches import Load
from tests.benchmarks.families import family_groups, import_upstream, short_family_groups
from tests.benchmarks.layers import floor, operations
from tests.benchmarks.loss import head_and_loss
from tests.benchmarks.machine import machine
from tests.benchmarks.mixers import mixers
from tests.benchmarks.models import variant_of, what_runs
from tests.benchmarks.profiling import counts, profile
from tests.benchmarks.shapes import SHAPES, TOKENS, log_normal_lengths
from tests.benchmarks.timing import Clock, Results, failure
from tests.benchmarks.workloads import Group, groups

IN_A_ROW = 10
"""Short steps that run one after the other, as a training loop has them: the host prepares a step
while the GPU is still at the one before. "ms" waits for the GPU after every step.
"""


def main(arguments: Sequence[str] | None = None) -> Results:
    """Measure the chosen rows and return them."""
    options = parse(arguments)
    if arguments is None:
        # Inductor writes what follows --only into the code that it makes, where an apostrophe ends
        # a string
        del sys.argv[1:]
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(
        options.out / "rows.jsonl", options.minutes, options.only, options.list, options.resume
    )
    clock = Clock("cpu" if options.list else options.device, options.warmup, options.runs)
    print(machine(clock.device), flush=True)
    if not options.list:
        import_upstream()
    families = *short_family_groups(options.tiny), *family_groups(options.tiny)
    for group in (*groups(options.tiny, options.backend), *families):
        run_group(group, results, clock, options)
    run_floors(results, clock, options.tiny)
    for tokens in (100,) if options.tiny else (TOKENS, 8192):
        head_and_loss(results, clock, tokens, *(256, 64) if options.tiny else (248320, 2048))
    run_layers(results, clock, options.tiny)
    return results


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for rows.jsonl and profiles"
    )
    parser.add_argument(
        "--only", default="", help="regular expression searched in 'workload variant'"
    )
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="rows that would begin later are skipped"
    )
    parser.add_argument(
        "--profile", action="store_true", help="profile one step of each row of a model, too"
    )
    parser.add_argument(
        "--backend",
        default="auto",
        type=backends,
        help="of apply_patches: a name, or op=name,op=name",
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="tiny models and rows")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="name the rows, run nothing")
    parser.add_argument(
        "--resume", action="store_true", help="leave out rows that DIR/rows.jsonl holds"
    )
    return parser.parse_args(arguments)


def backends(text: str) -> Any:
    """Read a name, or "op=name,op=name" as a dict."""
    return dict(part.split("=", 1) for part in text.split(",")) if "=" in text else text


def run_group(group: Group, results: Results, clock: Clock, options: argparse.Namespace) -> None:
    """Build the group's model once and time its rows; a model that cannot be built is every
    row's result.
    """
    rows = [row for row in group.rows if results.wanted(*row[:2])]
    if not rows or results.late():
        return _each(results, rows, lambda load: {})
    dtype = torch.bfloat16 if clock.device == "cuda" else torch.float32
    try:
        with variant_of(group.shape, group.variant, clock.device, dtype) as model:
            _time_rows(model, group, rows, results, clock, options.out if options.profile else None)
            # so that its memory is free when the block ends
            del model
    except Exception as error:
        result = failure(error)
        done = {(row["workload"], row["variant"]) for row in results.rows}
        _each(results, [row for row in rows if row[:2] not in done], lambda load: result)


def _time_rows(
    model: Any, group: Group, rows: Any, results: Results, clock: Clock, profiles: Path | None
) -> None:
    for batch in _batches(rows, group.in_turns):
        together = Together(model, [load for *_, load in batch], clock)
        for number, (workload, variant, _) in enumerate(batch):
            name = re.sub(r"[^a-z0-9]+", "-", f"profile {workload} {variant}".lower())
            target = None if profiles is None else profiles / f"{name}.json"
            results.row(workload, variant, partial(time_row, group, together, number, target))


@dataclass
class Together:
    """Batches of one model that are timed in turns, when the first of them is due."""

    model: Any
    loads: list[Load]
    clock: Clock
    timings: list[dict[str, float]] = field(default_factory=list)

    def step(self, number: int) -> Callable[[], Any]:
        """The training step of one batch."""
        return self.loads[number].step(self.model, self.clock.device)

    def timing(self, number: int) -> dict[str, float]:
        """See `Clock.in_turns`."""
        self.timings = self.timings or self.clock.in_turns(
            [self.step(i) for i in range(len(self.loads))]
        )
        return self.timings[number]


def _batches(rows: Any, in_turns: bool) -> list[list[Any]]:
    """Rows that are timed together: those of one workload, or each by itself."""
    if not in_turns:
        return [[row] for row in rows]
    return [list(batch) for _, batch in groupby(rows, key=lambda row: row[0])]


def _each(results: Results, rows: Any, measure: Any) -> None:
    for workload, variant, load in rows:
        results.row(workload, variant, partial(measure, load))


def time_row(
    group: Group, together: Together, number: int, profile_to: Path | None
) -> dict[str, Any]:
    """Return one batch's numbers and what ran."""
    model, load, clock = together.model, together.loads[number], together.clock
    row: dict[str, Any] = dict(together.timing(number))
    step = together.step(number)
    loss = float(step())
    if not loss < float("inf"):
        raise FloatingPointError(f"the step's loss is {loss}")
    with torch.autocast(model.device.type, torch.bfloat16, enabled=load.autocast):
        runs = what_runs(model)
    row |= {
        "real_tokens_per_s": load.real_tokens / row["ms"] * 1e3,
        **load.facts(),
        **runs,
    }
    row |= {
        "layers": group.shape.layers,
        "liger": group.variant.liger,
        "flash_qla": group.variant.flash_qla,
    }
    if group.variant.lora:
        row["lora"] = group.variant.lora
    if group.variant.fp32:
        row["weights"] = "fp32"
    note = "; ".join(part for part in (group.shape.note(), group.note) if part)
    if note:
        row["note"] = note
    if load.counted:
        row |= _counted(model, step, clock, 1 + len(load.also))
    if profile_to is not None:
        row["kernel_ms"] = profile(step, clock.device, profile_to)
    model.zero_grad(set_to_none=True)
    return row


def _counted(model: Any, step: Callable[[], Any], clock: Clock, batches: int) -> dict[str, Any]:
    """Return what a short step waits for, and its graphs."""
    in_a_row = [clock.once(step, IN_A_ROW) for _ in range(3)]
    row: dict[str, Any] = {"in_a_row_ms": median(in_a_row)} | counts(step, clock.device, batches)
    if clock.device == "cuda":
        # a graph's memory counts as free while nothing outlives its replay
        row["reserved_gib"] = torch.cuda.memory_reserved() / 2**30
    report = patch_report(model).cuda_graphs
    return row | ({"cuda_graphs": report} if report else {})


def run_floors(results: Results, clock: Clock, tiny: bool) -> None:
    """The matrix products of each shape alone."""
    for name, key in {"2b": "tiny", "9b": "tiny", "moe": "tiny-moe"}.items():
        shape, tokens = (SHAPES[key], 400) if tiny else (SHAPES[name], TOKENS)
        results.row(
            f"{name}-32k-packed", "matrix products alone", partial(floor, shape, tokens, clock)
        )


def run_layers(results: Results, clock: Clock, tiny: bool) -> None:
    """Every backend of every operation, one layer's worth; these wait for no host, so that few
    timings do.
    """
    clock = replace(clock, least=0.3)
    if tiny:
        widths = {"linear": [(2, 2), (2, 4)], "full": [(4, 2, 16)], "stream": [72], "adapted": []}
        operations(results, clock, [5, 64, 1, 30], size=16, widths=widths)
    else:
        operations(results, clock, log_normal_lengths(TOKENS))
    mixers(results, clock, [5, 64, 1, 30] if tiny else log_normal_lengths(TOKENS), tiny)


if __name__ == "__main__":
    main()
