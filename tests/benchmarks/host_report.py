"""The table of what the host does for one layer, from the newest result in results/host, which
`tests.benchmarks.report` writes with its own once there is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.benchmarks import report
from tests.benchmarks.timing import read_lines

FOLDER = report.RESULTS / "host"
PAGE, MARK = "docs/performance.md", "host"
COUNTS = {
    "frames": "Python functions",
    "c_calls": "C functions they call",
    "dispatched": "dispatcher calls",
    "nodes": "autograd nodes",
    "launches": "launches of our kernels",
    "kernels": "all kernels",
    "allocations": "allocations",
    "casts": "casts",
}
TIMES = {"host_ms": "ms, GPU waiting", "behind_ms": "ms, GPU busy"}


def newest(folder: Path = FOLDER) -> Path | None:
    """Return the result with the latest date in its name, or None."""
    return max(folder.glob("*.jsonl"), default=None)


def tables(path: Path | None) -> dict[tuple[str, str], str]:
    """Return {(page, mark): what the page has to hold there}, as `report.tables` does; nothing
    without a result.
    """
    if path is None:
        return {}
    about, *rows = read_lines(path)
    head = ["one layer, forward and backward, 2,048 tokens", *TIMES.values(), *COUNTS.values()]
    lines = [
        "What the host does to enqueue one layer, for which short steps without graphs wait. "
        f"{report.origin(about, rows)}; every number is in "
        f"`tests/benchmarks/results/host/{path.name}`.",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
    ]
    lines += [_line(row) for row in rows if "host_ms" in row]
    return {(PAGE, MARK): "\n".join(lines) + "\n"}


def _line(row: dict[str, Any]) -> str:
    times = [f"{row[name]:.2f}" if name in row else "" for name in TIMES]
    cells = f"{row['workload']}, {row['variant']}", *times, *(f"{row[name]:,}" for name in COUNTS)
    return f"| {' | '.join(cells)} |"
