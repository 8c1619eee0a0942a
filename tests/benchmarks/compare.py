"""Time the main rows of two trees of the package by turns on one machine: before, after, before,
after, ...

    python -m tests.benchmarks.compare --before DIR --out DIR [--after DIR] [--rounds N] [--only REGEX]
    python -m tests.benchmarks.compare --before DIR --out DIR --device cpu --tiny        # a trial of the script itself

A step is the trunk's forward and backward, bf16, without optimizer. Either tree has a process of
its own, with its package and this tree's harness, which touches public interfaces alone; both hold
the row's model, and one waits while the other is timed. A turn is short, so that what slows the
machine for seconds slows both. Rows go to DIR/compare.jsonl as they come; a row's ratios after /
before are printed after its last turn: the median of all rounds' ratios, and the best steps'.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

from tests.benchmarks.batches import Load, step_of
from tests.benchmarks.machine import machine
from tests.benchmarks.models import Variant, variant_of
from tests.benchmarks.run_all import ROOT, source
from tests.benchmarks.shapes import (
    SHAPES,
    TOKENS,
    Shape,
    batch_lengths,
    fixed_lengths,
    log_normal_lengths,
)
from tests.benchmarks.timing import Clock, asks_for, failure, free, parser_of, rounded

TREES = ("before", "after")
PACKFREE, LIGER = Variant(), Variant(liger="before")
HEADING = f"{'':44s} {'before ms':>10s} {'after ms':>10s} {'rounds':>8s} {'best':>7s} {'GiB':>15s}"
Row = tuple[str, str, Load]
"""Workload, variant, batch."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Time both trees by turns, or, in a process that was started for it, one of them."""
    options = parse(arguments)
    if options.tree:
        return be_timed(options)
    options.out.mkdir(parents=True, exist_ok=True)
    trees = {"before": options.before.resolve(), "after": options.after.resolve()}
    head = {
        "machine": machine(options.device),
        "source": {name: source(tree) for name, tree in trees.items()},
    }
    with ExitStack() as stack:
        file = stack.enter_context((options.out / "compare.jsonl").open("w", buffering=1))
        file.write(json.dumps(head) + "\n")
        processes = [
            stack.enter_context(process_of(name, tree, options)) for name, tree in trees.items()
        ]
        print(HEADING, flush=True)
        for _, _, rows in workloads(options):
            for workload, variant, _ in rows:
                turns = by_turns(processes, workload, variant, options.rounds, file)
                print(line_of(f"{workload} {variant}", turns), flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="the root of the other tree")
    parser.add_argument("--after", type=Path, default=ROOT, help="this tree if not given")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tree", choices=TREES, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def workloads(options: argparse.Namespace) -> list[tuple[Shape, Variant, list[Row]]]:
    """[(model, what runs in it, the rows that are asked for)]."""
    tiny = options.tiny
    packed = tuple(
        log_normal_lengths(400, longest=100, shortest=5) if tiny else log_normal_lengths(TOKENS)
    )
    padded = tuple(batch_lengths(4, 64, 0.5) if tiny else batch_lengths(8, 2048, 0.34))
    short = Load(tuple(fixed_lengths(*(200, 25) if tiny else (4096, 500))))
    shape, wide = (SHAPES["tiny"], SHAPES["tiny"]) if tiny else (SHAPES["2b"], SHAPES["9b"])
    few, experts = (
        (shape, SHAPES["tiny-moe"]) if tiny else (replace(shape, layers=8), SHAPES["moe"])
    )
    whole = [
        ("2b-32k-packed", "packfree", Load(packed)),
        ("2b-32k-packed", "packfree, one document", Load((sum(packed),), "record")),
        ("2b-8x2048-padded", "packfree, padded", Load(padded, "padded")),
    ]
    every = [
        (shape, PACKFREE, whole),
        (few, PACKFREE, [("2b-8layers-4k", "packfree, documents of 500", short)]),
        (wide, PACKFREE, [("9b-4k-packed", "packfree", short)]),
        (shape, LIGER, [("2b-32k-packed", "packfree+liger", Load(packed))]),
        (
            experts,
            PACKFREE,
            [("moe-32k-packed", "packfree", Load(packed)), ("moe-4k-packed", "packfree", short)],
        ),
    ]
    asked = [
        (*model, [row for row in rows if asks_for(options.only, *row[:2])])
        for *model, rows in every
    ]
    return [(shape, variant, rows) for shape, variant, rows in asked if rows]


# The process that compares.


@dataclass(frozen=True)
class Process:
    """One tree's: it says when a row's model is warm, and times a turn when asked."""

    name: str
    running: subprocess.Popen[str]

    def turn(self) -> dict[str, Any]:
        """Let it time one turn and return what it measured."""
        assert self.running.stdin
        self.running.stdin.write("turn\n")
        self.running.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Return what it says next."""
        assert self.running.stdout
        line = self.running.stdout.readline()
        if not line:
            status = self.running.wait()
            raise ChildProcessError(
                f"found the process of {self.name!r} ended with status {status}; wanted a row; see "
                f"above"
            )
        return json.loads(line)


@contextmanager
def process_of(name: str, tree: Path, options: argparse.Namespace) -> Iterator[Process]:
    """Start a tree's process in a folder that holds its package, which is found there before any
    other.
    """
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.compare",
        "--tree",
        name,
        "--before",
        str(tree),
    ]
    command += ["--out", str(options.out), "--only", options.only, "--device", options.device]
    command += ["--rounds", str(options.rounds), *["--tiny"] * options.tiny]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "hf_packfree").symlink_to(tree / "hf_packfree")
        running = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            yield Process(name, running)
        finally:
            running.kill()
            running.communicate()


def by_turns(
    processes: Sequence[Process], workload: str, variant: str, rounds: int, file: IO[str]
) -> list[list[dict[str, Any]]]:
    """Return both trees' turns of a row, and write each to the file."""
    for process in processes:
        # both are warm before one is timed
        process.answer()
    turns: list[list[dict[str, Any]]] = [[] for _ in processes]
    for number in range(rounds):
        for process, results in zip(processes, turns, strict=True):
            results.append(process.turn())
            row = {
                "tree": process.name,
                "round": number,
                "workload": workload,
                "variant": variant,
                **results[-1],
            }
            file.write(json.dumps(row) + "\n")
    return turns


def line_of(name: str, turns: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Return a row's line of the table: medians of the turns' medians and of the rounds' ratios,
    best steps', peak memory.
    """
    failed = [turn["error"] for turn in sum(map(list, turns), []) if "error" in turn]
    if failed:
        return f"{name:44s} {failed[0]}"
    ms, best, gib = (
        [pick(turn[key] for turn in results) for results in turns]
        for key, pick in (("ms", statistics.median), ("ms_min", min), ("peak_gib", max))
    )
    rounds = statistics.median(
        after["ms"] / before["ms"] for before, after in zip(*turns, strict=True)
    )
    ratios = f"{rounds:8.3f} {best[1] / best[0]:7.3f}"
    return f"{name:44s} {ms[0]:10.2f} {ms[1]:10.2f} {ratios} {gib[0]:7.2f} {gib[1]:7.2f}"


# The process that is timed.


def be_timed(options: argparse.Namespace) -> None:
    """Time the rows with the package that this process imports: a line of JSON when one is warm,
    and one for every turn.
    """
    import hf_packfree

    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        # what libraries print is no answer
        os.dup2(2, 1)
        tree = Path(hf_packfree.__file__).resolve().parents[1]
        print(f"{options.tree}: hf_packfree {hf_packfree.__version__}, {source(tree)}")
        clock = Clock(options.device, warmup=2, least=0.3, longest=4.0)
        dtype = torch.bfloat16 if clock.device == "cuda" else torch.float32
        for shape, variant, rows in workloads(options):
            with variant_of(shape, variant, clock.device, dtype) as model:
                for _, _, load in rows:
                    time_turns(model, load, clock, options.rounds, answers)
                # so that its memory is free when the block ends
                del model


def time_turns(model: Any, load: Load, clock: Clock, rounds: int, answers: IO[str]) -> None:
    """Warm a row up, say so, and time a turn whenever it is asked for."""
    step = step_of(model.base_model, [load.inputs(model.config.vocab_size, clock.device)])
    answers.write(json.dumps(turn(model, step, clock)) + "\n")
    for _ in range(rounds):
        if not sys.stdin.readline():
            raise SystemExit
        answers.write(json.dumps(turn(model, step, clock)) + "\n")


def turn(model: Any, step: Callable[[], Any], clock: Clock) -> dict[str, Any]:
    """Return what was measured, or the error, and give back all memory but the weights': the
    other process needs it.
    """
    try:
        return rounded(clock.measure(step))
    except Exception as error:
        return failure(error)
    finally:
        model.zero_grad(set_to_none=True)
        free()


if __name__ == "__main__":
    main()
