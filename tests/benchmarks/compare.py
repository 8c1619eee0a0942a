"""Time the main rows of two trees of the package in turns on one machine: before, after, before, after, ...

    python -m tests.benchmarks.compare --before DIR --out DIR [--after DIR] [--rounds N] [--only REGEX]
    python -m tests.benchmarks.compare --before DIR --out DIR --device cpu --tiny        # a trial of the script itself

A step is the trunk's forward and backward, bf16, without optimizer.  Every turn is a process of its own with one tree's
package and this tree's harness, which touches public interfaces alone.  Rows go to DIR/compare.jsonl as they come; the
ratios after / before, of the medians of all turns and of their best steps, are printed after every round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.batches import Load, step_of
from tests.benchmarks.machine import machine
from tests.benchmarks.models import Variant, variant_of
from tests.benchmarks.run_all import ROOT, source
from tests.benchmarks.shapes import SHAPES, TOKENS, Shape, batch_lengths, fixed_lengths, log_normal_lengths
from tests.benchmarks.timing import Clock, Results, name_of, read_lines

TREES = ("before", "after")
PACKFREE, LIGER = Variant(), Variant(liger="before")


def main(arguments: Sequence[str] | None = None) -> None:
    """Time both trees in turns, or, in a process that was started for it, one of them."""
    options = parse(arguments)
    if options.tree:
        return time_rows(options)
    options.out.mkdir(parents=True, exist_ok=True)
    trees = {"before": options.before.resolve(), "after": options.after.resolve()}
    head = {"machine": machine(options.device), "source": {name: source(tree) for name, tree in trees.items()}}
    file = options.out.resolve() / "compare.jsonl"
    file.write_text(json.dumps(head) + "\n")
    for number in range(options.rounds):
        for name, tree in trees.items():
            with tempfile.TemporaryDirectory() as folder:
                run_turn(name, tree, Path(folder), options)
            with file.open("a") as output:
                for row in read_lines(options.out / f"{name}.jsonl"):
                    output.write(json.dumps({"tree": name, "round": number, **row}) + "\n")
        print(table(read_lines(file)[1:]), flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="the root of the other tree")
    parser.add_argument("--after", type=Path, default=ROOT, help="this tree if not given")
    parser.add_argument("--out", type=Path, required=True, help="folder for compare.jsonl")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", help="regular expression searched in a row's name")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="tiny models and rows")
    parser.add_argument("--tree", choices=TREES, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run_turn(name: str, tree: Path, folder: Path, options: argparse.Namespace) -> None:
    """Run one turn in a folder that holds the tree's package, which is found there before any other."""
    (folder / "hf_packfree").symlink_to(tree / "hf_packfree")
    (options.out / f"{name}.jsonl").unlink(missing_ok=True)
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    command = [sys.executable, "-m", "tests.benchmarks.compare", "--tree", name, "--before", str(tree)]
    command += ["--out", str(options.out.resolve()), "--only", options.only, "--device", options.device]
    command += ["--tiny"] * options.tiny
    subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, check=True)


def workloads(tiny: bool) -> list[tuple[Shape, Variant, list[tuple[str, str, Load]]]]:
    """[(model, what runs in it, [(workload, variant, batch)])]."""
    packed = tuple(log_normal_lengths(400, longest=100, shortest=5) if tiny else log_normal_lengths(TOKENS))
    padded = tuple(batch_lengths(4, 64, 0.5) if tiny else batch_lengths(8, 2048, 0.34))
    short = Load(tuple(fixed_lengths(*(200, 25) if tiny else (4096, 500))))
    shape, wide = (SHAPES["tiny"], SHAPES["tiny"]) if tiny else (SHAPES["2b"], SHAPES["9b"])
    whole = [
        ("2b-32k-packed", "packfree", Load(packed)),
        ("2b-32k-packed", "packfree, one document", Load((sum(packed),), "record")),
        ("2b-8x2048-padded", "packfree, padded", Load(padded, "padded")),
    ]
    few, experts = (shape, SHAPES["tiny-moe"]) if tiny else (replace(shape, layers=8), SHAPES["moe"])
    return [
        (shape, PACKFREE, whole), (few, PACKFREE, [("2b-8layers-4k", "packfree, documents of 500", short)]),
        (wide, PACKFREE, [("9b-4k-packed", "packfree", short)]),
        (shape, LIGER, [("2b-32k-packed", "packfree+liger", Load(packed))]),
        (experts, PACKFREE, [("moe-32k-packed", "packfree", Load(packed)), ("moe-4k-packed", "packfree", short)]),
    ]


def time_rows(options: argparse.Namespace) -> None:
    """Time the rows with the package that this process imports."""
    import hf_packfree

    print(f"{options.tree}: hf_packfree {hf_packfree.__version__}, {source(Path(hf_packfree.__file__).resolve().parents[1])}")
    clock = Clock(options.device, warmup=3, least=2.5, longest=6.0)
    results = Results(options.out / f"{options.tree}.jsonl", only=options.only)
    for shape, variant, rows in workloads(options.tiny):
        rows = [row for row in rows if results.wanted(*row[:2])]
        if rows:
            time_model(shape, variant, rows, results, clock)


def time_model(
    shape: Shape, variant: Variant, rows: list[tuple[str, str, Load]], results: Results, clock: Clock
) -> None:
    """Build a model, time its rows and free its memory."""
    dtype = torch.bfloat16 if clock.device == "cuda" else torch.float32
    with variant_of(shape, variant, clock.device, dtype) as model:
        for workload, name, load in rows:
            results.row(workload, name, partial(time_row, model, load, clock))
        del model  # so that its memory is free when the block ends


def time_row(model: Any, load: Load, clock: Clock) -> dict[str, Any]:
    """Return one batch's timing."""
    step = step_of(model.base_model, load.inputs(model.config.vocab_size, clock.device))
    timing = clock.measure(step)
    model.zero_grad(set_to_none=True)
    return timing | {"real_tokens_per_s": load.real_tokens / timing["ms"] * 1e3}


def table(rows: list[dict[str, Any]]) -> str:
    """Return before, after and their ratios, row by row; a row that failed says how."""
    lines = [f"{'':44s} {'before ms':>10s} {'after ms':>10s} {'medians':>8s} {'best':>7s} {'GiB':>15s}"]
    for name in dict.fromkeys((row["workload"], row["variant"]) for row in rows):
        turns = [[row for row in rows if name_of(row) == name and row["tree"] == tree] for tree in TREES]
        failed = [row["error"] for row in sum(turns, []) if "error" in row]
        lines.append(f"{' '.join(name):44s} " + (failed[0] if failed else ratios(*turns) if all(turns) else "no result"))
    return "\n".join(lines)


def ratios(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """Return one line's numbers: medians of the turns' medians, the best step of all turns, peak memory."""
    ms, best, gib = (
        [pick(row[key] for row in turns) for turns in (before, after)]
        for key, pick in (("ms", statistics.median), ("ms_min", min), ("peak_gib", max))
    )
    return f"{ms[0]:10.2f} {ms[1]:10.2f} {ms[1] / ms[0]:8.3f} {best[1] / best[0]:7.3f} {gib[0]:7.2f} {gib[1]:7.2f}"


if __name__ == "__main__":
    main()
