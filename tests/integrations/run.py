"""Run the tests that are marked `@integration` and make the table of docs/compatibility.md from
their results.

    python -m tests.integrations.run               print the table
    python -m tests.integrations.run --write       put it into docs/compatibility.md
    python -m tests.integrations.run --report integrations.xml      from a report that pytest wrote earlier with --junitxml
    python -m tests.integrations.run --check       fail where the table has other numbers than a committed run on two GPUs

A row is what tests of any room say of themselves with `@integration`; it holds if every one that
ran has passed. One needs two GPUs, and takes the numbers of committed runs where it was skipped.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/compatibility.md"
MARK = "<!-- integrations -->"
ON_TWO = ROOT / "tests/benchmarks/results/parallel"
NEEDS_TWO = "accelerate", "own loop, FSDP2 plugin, two GPUs"
"""The row of that test."""
LIBRARIES = (
    "Trainer",
    "TRL SFTTrainer",
    "TRL DPOTrainer",
    "TRL trainers",
    "PEFT",
    "accelerate",
    "torch",
    "torch.compile",
    "DeepSpeed",
    "transformers",
    "Liger",
    "FlashQLA",
)
VERSIONS = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "deepspeed",
    "bitsandbytes",
    "torchao",
    "liger-kernel",
    "kernels",
    "triton",
)
HEAD = ("with", "what", "verdict", "off by", "unpatched")


@dataclass
class Row:
    """One line of the table, from all tests that are marked with it.

    Attributes:
        says: what holds if they pass.
        failed, skipped: names of tests that failed, reasons of those that were skipped.
        passed: how many passed.
        errors, controls: relative RMS of what they compared, ours and the unpatched model's.
    """

    library: str
    what: str
    says: str
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    passed: int = 0
    errors: list[float] = field(default_factory=list)
    controls: list[float] = field(default_factory=list)

    def verdict(self) -> str:
        """What is so, as far as the tests ran."""
        if self.failed:
            return f"**fails**: {', '.join(self.failed)}"
        if not self.passed:
            return f"not run here: {self.skipped[0]}"
        return self.says

    def cells(self) -> tuple[str, ...]:
        """The line."""
        error = f"{max(self.errors):.0e}" if self.errors else ""
        control = f"{min(self.controls):.0e}" if self.controls else ""
        return self.library, self.what, self.verdict(), error, control


def run_tests(workers: int, report: Path) -> None:
    """Let pytest write its report."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests",
        "-m",
        "integration",
        "-q",
        f"-n{workers}",
        f"--junitxml={report}",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    command += ["-p", "no:cacheprovider"]
    subprocess.run(command, cwd=ROOT, env=environment)


def read(report: Path) -> list[Row]:
    """Return the rows of a report, library by library, in the order of the alphabet."""
    rows: dict[tuple[str, str], Row] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        facts = [(entry.get("name", ""), entry.get("value", "")) for entry in case.iter("property")]
        named = dict(facts)
        if "library" not in named:
            continue
        row = rows.setdefault(
            (named["library"], named["what"]), Row(named["library"], named["what"], named["says"])
        )
        if row.says != named["says"]:
            raise ValueError(
                f"found two verdicts for {row.what}: {row.says!r} and {named['says']!r}; wanted one"
            )
        _add(row, case, facts)
    return sorted(rows.values(), key=lambda row: (LIBRARIES.index(row.library), row.what.lower()))


def _add(row: Row, case: ElementTree.Element, facts: list[tuple[str, str]]) -> None:
    skipped = case.find("skipped")
    if case.find("failure") is not None or case.find("error") is not None:
        row.failed.append(case.get("name", ""))
    elif skipped is not None:
        row.skipped.append(skipped.get("message", ""))
    else:
        row.passed += 1
        row.errors += [float(value) for name, value in facts if name == "error"]
        row.controls += [float(value) for name, value in facts if name == "control"]


def add_committed(row: Row) -> None:
    """Take into the row of `NEEDS_TWO` what runs on two GPUs measured."""
    for path in sorted(ON_TWO.glob("*.json")):
        run = json.loads(path.read_text())
        found = run["ways"].get("accelerate fsdp2")
        if run["passed"] and run["processes"] == 2 and found is not None:
            row.passed += 1
            row.errors.append(found["gradients"])
            row.controls.append(found["control"])


def check() -> int:
    """Compare the page's line of `NEEDS_TWO` with the committed runs."""
    row = Row(*NEEDS_TWO, "")
    add_committed(row)
    *_, error, control = row.cells()
    begin, end = f"| {' | '.join(NEEDS_TWO)} |", f"| {error} | {control} |"
    (line,) = (line for line in PAGE.read_text().splitlines() if line.startswith(begin))
    if not line.endswith(end):
        print(
            f"found {line!r}; wanted {end!r} at its end; python -m tests.integrations.run --write"
        )
    return 0 if line.endswith(end) else 1


def markdown(rows: list[Row]) -> str:
    """Return the table, with the day it was made and the versions it was made with."""
    versions = ", ".join(
        f"{name} {metadata.version(name)}" for name in VERSIONS if _installed(name)
    )
    day = datetime.date.today().isoformat()
    lines = [
        f"Made on {day} by `python -m tests.integrations.run --write` on a CPU with {versions}.",
        "",
    ]
    lines += [
        "| " + " | ".join(cells) + " |"
        for cells in (HEAD, ("---",) * len(HEAD), *(row.cells() for row in rows))
    ]
    return "\n".join(lines)


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def write(table: str) -> None:
    """Put the table between the two marks of its page."""
    PAGE.write_text(
        re.sub(
            f"{MARK}.*?{MARK}", lambda _: f"{MARK}\n{table}\n{MARK}", PAGE.read_text(), flags=re.S
        )
    )


def main() -> int:
    """Run, print the table, and return 0 if nothing failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="write the table into docs/compatibility.md"
    )
    parser.add_argument("--report", type=Path, help="read this report instead of running the tests")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 8))
    parser.add_argument("--check", action="store_true", help="compare the page with committed runs")
    options = parser.parse_args()
    if options.check:
        return check()
    with tempfile.TemporaryDirectory() as folder:
        report = options.report or Path(folder) / "integrations.xml"
        if options.report is None:
            run_tests(options.workers, report)
        rows = read(report)
    for row in rows:
        if (row.library, row.what) == NEEDS_TWO and not row.passed:
            add_committed(row)
    table = markdown(rows)
    print(table)
    if options.write:
        write(table)
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
