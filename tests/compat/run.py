"""Run the tests marked `compat` on several releases of transformers, each in an environment of its
own.

    python -m tests.compat.run                  a selection: one release between any two changes upstream
    python -m tests.compat.run --all --write    all of them; puts their rows into docs/compat_full.md
    python -m tests.compat.run 5.8.1 5.23.0     these
    python -m tests.compat.run --once           the selection as CI runs it

Unless told `--once`, every release runs twice: bare, and with the `kernels` it accepts and stand-ins for
flash-linear-attention and causal-conv1d (tests/fakes), where tests marked `compat(kernels=False)`
would say the same again. Exit code 0: exact on all; 1: a test fails; 2: an environment cannot be
made.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.compat.environments import CannotMake, Environments, environments
from tests.compat.measure import Outcome, measure
from tests.compat.table import HEAD, row_of, write

EVERY = (
    "5.2.0",
    "5.3.0",
    "5.4.0",
    "5.8.1",
    "5.9.0",
    "5.12.1",
    "5.13.1",
    "5.14.1",
    "5.15.1",
    "5.16.1",
    "5.17.0",
    "5.19.0",
    "5.20.2",
    "5.22.2",
    "5.23.0",
    "5.24.0",
)
SELECTED = ("5.2.0", "5.4.0", "5.8.1", "5.12.1", "5.14.1", "5.16.1", "5.19.0", "5.23.0", "5.24.0")
"""The oldest, the newest, and the last release before each change of what upstream calls, caches
or checkpoints with.
"""

SHOWN = 10
"""How many failing tests of a run are named."""


def main() -> int:
    """Run, print the table, and return the exit code."""
    options = _options()
    versions = options.versions or (EVERY if options.all else SELECTED)
    console, begun = Console(width=None if sys.stdout.isatty() else 150), time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            places = list(pool.map(lambda version: environments(version, options.envs), versions))
        except CannotMake as error:
            console.print(str(error), style="red", markup=False)
            return 2
        console.print(f"{len(versions)} environments ready after {_minutes(begun)}")
        runs = [
            [
                (name, pool.submit(measure, python, fakes=fakes))
                for name, python, fakes in _runs_of(version, place, options.once)
            ]
            for version, place in zip(versions, places)
        ]
        rows, failed = [], 0
        for version, place, named in zip(versions, places, runs):
            outcomes = [_announced(console, *run) for run in named]
            rows.append(row_of(version, place.version, outcomes))
            failed += sum(len(outcome.failed) for outcome in outcomes)
            # at once: what is interrupted keeps what it has
            if options.write:
                write(rows[-1])
    _show(console, rows)
    verdict = f"{failed} tests fail" if failed else "exact on every one of them"
    console.print(f"{len(versions)} releases of transformers in {_minutes(begun)}: {verdict}.")
    return 1 if failed else 0


def _runs_of(version: str, place: Environments, once: bool) -> list[tuple[str, Path, bool]]:
    """Return (name, interpreter, whether with kernel packages) of the runs of a release; `once`:
    one, which no other step of CI makes.

    README's test command runs the newest release bare, the step `lowest` the oldest.
    """
    bare = version, place.bare, False
    kernels = f"{version} with kernel packages", place.kernels, True
    if not once:
        return [bare, kernels]
    return [kernels] if version in (SELECTED[0], SELECTED[-1]) else [bare]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", help="releases (default: the selection)")
    parser.add_argument("--all", action="store_true", help="every release that is supported")
    parser.add_argument(
        "--envs", type=Path, default=Path.home() / ".cache" / "hf_packfree" / "compat"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--write", action="store_true", help="write the rows into docs")
    parser.add_argument(
        "--once", action="store_true", help="each release once, as CI does beside its other steps"
    )
    options = parser.parse_args()
    if options.once and options.write:
        parser.error("found --once with --write; wanted both runs of a release in its row")
    return options


def _announced(console: Console, name: str, run: Future[Outcome]) -> Outcome:
    outcome = run.result()
    worst = [f"{max(column):.0e}" for column in zip(*outcome.errors.values())]
    verdict = f"{len(outcome.failed)} fail" if outcome.failed else "exact"
    console.print(f"{name}: {verdict}, worst {' / '.join(worst)}")
    for test in outcome.failed[:SHOWN]:
        console.print(f"  {test}", style="red", markup=False)
    if outcome.failed[SHOWN:]:
        console.print(f"  and {len(outcome.failed) - SHOWN} more", style="red")
    return outcome


def _show(console: Console, rows: list[tuple[str, ...]]) -> None:
    title = "worst relative RMS of logits / gradients against a forward and backward per document"
    table = Table("", *(row[0] for row in rows), title=title)
    for cells in list(zip(HEAD, *rows))[1:]:
        table.add_row(*cells)
    console.print(table)


def _minutes(begun: float) -> str:
    return f"{(time.monotonic() - begun) / 60:.1f} minutes"


if __name__ == "__main__":
    sys.exit(main())
