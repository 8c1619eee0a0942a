"""Time a step: medians of CUDA events, peak memory, a budget of minutes, results written as they
come.

Times in ms, memory in GiB. Imports nothing of the package: other engines are timed with it, too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Turn:
    """A step, warm, and what its timings said so far.  Times in ms."""

    step: Callable[[], Any]
    warm_s: float
    repeats: int
    times: list[float] = field(default_factory=list)
    peak: float = 0.0

    def goes_on(self, runs: int, least: float, longest: float) -> bool:
        """Whether it wants more timings: so many runs and at least so long, two at least, and
        not for longer than that.
        """
        total = sum(self.times) * self.repeats
        return len(self.times) < 2 or (
            (len(self.times) < runs or total < least) and total < longest
        )

    def result(self) -> dict[str, float]:
        """See `Clock.measure`."""
        return {
            "ms": statistics.median(self.times),
            "ms_min": min(self.times),
            "ms_max": max(self.times),
            "runs": len(self.times),
            "repeats": self.repeats,
            "warmup_s": self.warm_s,
            "peak_gib": self.peak,
        }


@dataclass(frozen=True)
class Clock:
    """How a step is timed: on "cuda" by events on the stream, elsewhere by the wall.

    Attributes:
        device: "cuda" or "cpu".
        warmup, runs: how many steps come before and count.
        least: seconds of timed steps on "cuda", so that short ones, which wait for the host, are
            timed more often.
        longest: seconds of timed steps after which no further one begins (two count at least).
        shortest: ms that a timing lasts at least; shorter steps are repeated within it, so that the
            device never waits for the host between them, and divided by their number.
    """

    device: str
    warmup: int = 2
    runs: int = 5
    least: float = 2.5
    longest: float = 12.0
    shortest: float = 10.0

    def measure(self, step: Callable[[], Any]) -> dict[str, float]:
        """Return {"ms": median, "ms_min", "ms_max", "warmup_s": seconds of the warm-up,
        "peak_gib": of the timed steps}.
        """
        return self.in_turns([step])[0]

    def in_turns(self, steps: Sequence[Callable[[], Any]]) -> list[dict[str, float]]:
        """Return what `measure` does of each, timed one after the other again and again: what
        slows one down slows all.
        """
        return self._timed([self._warmed(step) for step in steps])

    def _warmed(self, step: Callable[[], Any]) -> Turn:
        started = time.perf_counter()
        for _ in range(self.warmup):
            step()
        self._wait()
        warm = time.perf_counter() - started
        repeats = (
            1
            if self.device != "cuda"
            else max(1, min(50, int(self.shortest / max(self.once(step), 1e-3))))
        )
        return Turn(step, warm, repeats)

    def _timed(self, turns: list[Turn]) -> list[dict[str, float]]:
        least, longest = (self.least * 1e3 if self.device == "cuda" else 0.0), self.longest * 1e3
        while any(turn.goes_on(self.runs, least, longest) for turn in turns):
            for turn in turns:
                if self.device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                turn.times.append(self.once(turn.step, turn.repeats))
                if self.device == "cuda":
                    turn.peak = max(turn.peak, torch.cuda.max_memory_allocated() / 2**30)
        return [turn.result() for turn in turns]

    def once(self, step: Callable[[], Any], repeats: int = 1) -> float:
        """Return the ms of one step, the mean of `repeats`."""
        if self.device != "cuda":
            started = time.perf_counter()
            step()
            return (time.perf_counter() - started) * 1e3
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            step()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / repeats

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def parser_of(script: str | None, *, minutes: float | None = None) -> argparse.ArgumentParser:
    """Return the options that scripts share, given the script's docstring; with `minutes`, that many
    by default, also `--minutes`.
    """
    parser = argparse.ArgumentParser(description=(script or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON lines")
    parser.add_argument("--only", default="", help="searched in 'workload variant'")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="tiny models and rows")
    if minutes is not None:
        parser.add_argument("--minutes", type=float, default=minutes)
    return parser


@dataclass
class Results:
    """Rows, appended to a file of JSON lines the moment they are known, so that a cut-off run loses
    one row at most.

    Attributes:
        path: where the lines go.
        minutes: after this many, rows are skipped and say so.
        only: a row runs where this is found in "workload variant".
        names_only: print the rows' names and run none.
        resume: leave out rows that the file already holds.
    """

    path: Path
    minutes: float = 1e9
    only: str = ""
    names_only: bool = False
    resume: bool = False
    started: float = field(default_factory=time.monotonic)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.done = (
            {name_of(row) for row in read_lines(self.path) if "skipped" not in row}
            if self.resume
            else set()
        )

    def wanted(self, workload: str, variant: str) -> bool:
        """Whether `only` asks for this row."""
        return (workload, variant) not in self.done and asks_for(self.only, workload, variant)

    def late(self) -> bool:
        """Whether the budget is spent."""
        return self.names_only or time.monotonic() - self.started > self.minutes * 60

    def row(self, workload: str, variant: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Run one row in isolation: what it raises is its result."""
        if not self.wanted(workload, variant):
            return
        row: dict[str, Any] = {"workload": workload, "variant": variant}
        began = time.monotonic()
        if self.late():
            row["skipped"] = f"after {self.minutes:g} minutes"
        else:
            try:
                row |= measure()
            except Exception as error:
                row |= failure(error)
            # what an out-of-memory error's traceback kept alive
            free()
            row["row_s"] = round(time.monotonic() - began, 1)
        self.add(row)
        if "error" in row and not _alive():
            print("the device does not answer any more", flush=True)
            os._exit(DEAD)

    def add(self, row: dict[str, Any]) -> None:
        """Write and print one row."""
        row = rounded(row)
        self.rows.append(row)
        if self.names_only:
            print(f"{row['workload']:28s} {row['variant']}")
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(line_of(row), flush=True)


DEAD = 17
"""Exit status of a process whose device failed for good: a fresh process can go on with
`resume`.
"""


def free() -> None:
    """Give the device's memory back; call it when nothing refers to the model any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def end_if_failed(results: Results) -> None:
    """End this process where the last row failed in it: other ranks may wait for its exchanges."""
    if "error" in (results.rows or [{}])[-1]:
        os._exit(DEAD)


def _alive() -> bool:
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def asks_for(only: str, workload: str, variant: str) -> bool:
    """Whether `--only` does, a regular expression that is searched in both together."""
    return re.search(only, f"{workload} {variant}") is not None


def failure(error: Exception) -> dict[str, str]:
    """Return what a row has in the place of timings."""
    return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def name_of(row: dict[str, Any]) -> tuple[str, str]:
    """What tells rows apart."""
    return row["workload"], row["variant"]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the file's lines of JSON; none where it does not exist, and not the last one if it
    was cut off.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def rounded(value: Any) -> Any:
    """Round floats to 5 significant digits, everywhere inside."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def line_of(row: dict[str, Any]) -> str:
    """Return one printable line of a row."""
    name = f"{row.get('workload', ''):28s} {row.get('variant', ''):44s}"
    if "ms" not in row:
        return f"{name} {row.get('error') or row.get('skipped') or row}"
    speed = f"{row['real_tokens_per_s']:10,.0f} tok/s" if "real_tokens_per_s" in row else " " * 16
    return (
        f"{name} {row['ms']:10.3f} ms {speed} {row.get('peak_gib', 0.0):7.2f} GiB  "
        f"({row.get('row_s', 0):.0f} s)"
    )
