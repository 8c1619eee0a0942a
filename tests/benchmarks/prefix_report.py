"""The table of docs/rl.md: steps of samples that share prefixes, from the newest result in
results/trees, which `tests.benchmarks.report` writes with its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.benchmarks import report
from tests.benchmarks.timing import read_lines

FOLDER = report.RESULTS / "trees"
PAGE, MARK = "docs/rl.md", "trees"
TITLES = {
    "2b-group16": "2B shape: a prompt of 2,048 tokens with 16 answers of 512",
    "2b-multiturn": "2B shape: a tree of three levels, four children each, segments of 300 tokens",
}
HEAD = ("one step", "tokens computed", "ms", "peak GiB", "times as long as the tree")


def newest(folder: Path = FOLDER) -> Path:
    """Return the result with the latest date in its name."""
    return report.newest(folder, "*.jsonl")


def tables(path: Path) -> dict[tuple[str, str], str]:
    """Return {(page, mark): what the page has to hold there}, as `report.tables` does."""
    about, *rows = read_lines(path)
    lines = [
        f"{report.origin(about, rows)}; every number is in "
        f"`tests/benchmarks/results/trees/{path.name}`.",
        "",
        f"| {' | '.join(HEAD)} |",
        "|---" * len(HEAD) + "|",
    ]
    for workload, title in TITLES.items():
        lines.append(f"| **{title}** | | | | |")
        lines += [_line(row) for row in rows if row["workload"] == workload]
    return {(PAGE, MARK): "\n".join(lines) + "\n"}


def _line(row: dict[str, Any]) -> str:
    if "ms" not in row:
        kind = row["error"].split(":")[0]
        outcome = "out of memory" if kind == "OutOfMemoryError" else kind
        return f"| {row['variant']} | | {outcome} | | |"
    # of rows that were not timed in turns with a tree there is none
    ratio = "" if row["times_as_long"] is None else f"{row['times_as_long']:.2f}"
    return (
        f"| {row['variant']} | {row['tokens']:,} | {row['ms']:,.1f} | {row['peak_gib']:.1f} | "
        f"{ratio} |"
    )
