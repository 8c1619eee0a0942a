"""The table of docs/performance.md that says what the host does for one layer, from the newest result
in results/host, which `tests.benchmarks.report` writes with its own.
"""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks import report
from tests.benchmarks.timing import read_lines

FOLDER = report.RESULTS / "host"
MARK = ("docs/performance.md", "host")
COLUMNS = {
    "enqueued in": "host_ms",
    "Python frames": "frames",
    "C calls from Python": "c_calls",
    "dispatcher": "dispatched",
    "allocations": "allocations",
    "casts": "casts",
    "autograd nodes": "nodes",
    "our Triton launches": "launches",
    "kernels": "kernels",
}
"""{column: field of a row}."""


def newest(folder: Path = FOLDER) -> Path:
    """Return the result with the latest date in its name."""
    return report.newest(folder, "*.jsonl")


def tables(path: Path) -> dict[tuple[str, str], str]:
    """Return {(page, mark): what the page has to hold there}, as `report.tables` does."""
    about, *rows = read_lines(path)
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("torch", "triton"))
    lines = [
        f"Made on {about['date']} on one {about['machine']} ({about['processor']}) with {versions}; "
        f"every number is in `tests/benchmarks/results/host/{path.name}`.",
        "",
        f"| forward and backward | {' | '.join(COLUMNS)} |",
        "|---" * (1 + len(COLUMNS)) + "|",
    ]
    for row in rows:
        lora = ", fp32 LoRA" * ("LoRA" in row["variant"])
        cells = (
            f"{row[field]:.1f} ms" if field == "host_ms" else f"{row[field]:,}"
            for field in COLUMNS.values()
        )
        lines.append(f"| {row['workload']}{lora} | {' | '.join(cells)} |")
    return {MARK: "\n".join(lines) + "\n"}
