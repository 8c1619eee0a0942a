"""The tables of families beside Qwen's, which `tests.benchmarks.report` writes with its own, from the
newest result of each machine in results/families; a line in their place where there is none yet.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from tests.benchmarks import report
from tests.benchmarks.families import ROWS, TITLES

FOLDER = report.RESULTS / "families"
ONLY = "(granite4h|llama|lfm2|nemotronh|gptoss|kimi)-"
TIMES = f"`python -m tests.benchmarks.run_all --no-tests --only '{ONLY}'` does"
MISSING = f"Not timed yet: {TIMES}.\n"
MARK = "families"
OURS = ("packfree", "packfree+liger")
PADDED = ("unpatched padded, kernels put in", "unpatched padded")
HEAD = (
    "one step",
    "transformers, packed",
    "composed by hand",
    "packfree",
    "transformers, padded",
    "packfree, padded",
)
COMPOSED = "what is composed by hand"
BESIDE = {
    "transformers alone": ("unpatched packed", *PADDED),
    COMPOSED: ("composed without packfree",),
}
"""What stands beside ours: {what it is: its variants}."""
Rows = dict[str, dict[str, Any]]


def newest_of_each(folder: Path = FOLDER) -> list[Path]:
    """Return the newest result of each machine."""
    return report.newest_of_each(folder)


def tables(paths: Sequence[Path]) -> dict[tuple[str, str], str]:
    """Return {(page, mark): what the page has to hold there}, as `report.tables` does."""
    pages = ("docs/performance.md", MARK), ("docs/rows.md", MARK)
    results = {path: json.loads(path.read_text()) for path in paths}
    if not results:
        return dict.fromkeys(pages, MISSING)
    made = {
        path: f"{report.origin(result, result['rows'])}; every number is in "
        f"`tests/benchmarks/results/families/{path.name}`.\n"
        for path, result in results.items()
    }
    short, whole = [], []
    for path, result in results.items():
        short += [made[path], beside(result), report.operations(result)]
        whole += [made[path], every(result)]
    short.append(_missing([row for result in results.values() for row in result["rows"]]))
    return dict(zip(pages, ("\n".join(filter(None, short)), "\n".join(whole))))


def beside(result: dict[str, Any]) -> str:
    """A row for each family: times and memory beside ours, and in brackets how often ours goes into
    them.
    """
    found = {}
    for name, row in ROWS.items():
        packed = report.rows_of(result, f"{name}-32k-packed")
        padded = report.rows_of(result, f"{name}-8x2048-padded")
        ours, third = _fastest(packed, OURS), _fastest(padded, ("packfree, padded",))
        if ours or third:
            found[report.heading(row.title, packed or padded)] = (
                _cell(packed.get("unpatched packed"), ours, "leaks" in row.packed_note),
                _cell(packed.get("composed without packfree"), ours),
                _cell(ours, None),
                _cell(_fastest(padded, PADDED) or padded.get("unpatched padded"), third),
                _cell(third, None),
            )
    # columns of which something was run
    shown = [any(column) for column in zip(*found.values())]
    lines = [
        f"| {' | '.join([first, *compress(cells, shown)])} |"
        for first, cells in {HEAD[0]: HEAD[1:], **found}.items()
    ]
    return "\n".join([lines[0], "|---" * (1 + sum(shown)) + "|", *lines[1:]]) + "\n"


def _missing(rows: Sequence[dict[str, Any]]) -> str:
    """Name the families of which nothing was timed, or nothing of what stands beside ours."""
    families: dict[str, list[str]] = {}
    for name, family in ROWS.items():
        own = [row for row in rows if row["workload"].startswith(f"{name}-")]
        ran = {row["variant"] for row in own if "skipped" not in row}
        columns = [
            column
            for column, names in BESIDE.items()
            if ran.isdisjoint(names) and (family.composed or column != COMPOSED)
        ]
        timed = any("ms" in row for row in own)
        left = " and ".join(columns) if timed else ""
        if left or not timed:
            families.setdefault(left, []).append(family.title.split(" (")[0])
    said = "; ".join(
        (f"{columns} for " if columns else "") + " and ".join(names)
        for columns, names in sorted(families.items(), reverse=True)
    )
    return f"Not timed yet: {said}; {TIMES}.\n" if said else ""


def _fastest(rows: Rows, names: tuple[str, ...]) -> dict[str, Any] | None:
    timed = [rows[name] for name in names if "ms" in rows.get(name, {})]
    return min(timed, key=lambda row: float(row["ms"]), default=None)


def _cell(row: dict[str, Any] | None, ours: dict[str, Any] | None, leaks: bool = False) -> str:
    if row is None:
        return ""
    if "ms" not in row:
        kind = str(row.get("error", "not measured")).split(":")[0]
        return "out of memory" if kind == "OutOfMemoryError" else kind
    against = f" ({row['ms'] / ours['ms']:.1f} x)" if ours else ""
    return f"{row['ms']:,.0f} ms, {row['peak_gib']:.0f} GiB{against}{', leaks' * leaks}"


def every(result: dict[str, Any]) -> str:
    """Every row, by speed, with what its reader has to know."""
    lines = ["| one step | ms | real tokens/s | peak GiB | what runs |", "|---" * 5 + "|"]
    for workload, title in TITLES.items():
        rows = report.rows_of(result, workload)
        if rows:
            lines.append(f"| **{report.heading(title, rows)}** | | | | |")
            ordered = sorted(rows.values(), key=lambda row: -row.get("real_tokens_per_s", 0))
            lines += [_line(row) for row in ordered]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    runs = [f"{op}: {name}" for op, name in row.get("implementations", {}).items()]
    what = "; ".join(filter(None, (*runs, row.get("note"))))
    if "ms" not in row:
        return f"| {row['variant']} | {_cell(row, None)} | | | {what} |"
    return (
        f"| {row['variant']} | {row['ms']:,.0f} | {row['real_tokens_per_s']:,.0f} | "
        f"{row['peak_gib']:.1f} | {what} |"
    )
