"""The tables and the plot of steps of few tokens, which `tests.benchmarks.report` writes with its own,
from the results in results/short.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.benchmarks import report

FOLDER = report.RESULTS / "short"
MARK = ("docs/performance.md", "short")
PLOT = "docs/short_steps.png"
KINDS = {
    "": "trunk, full, bf16 weights",
    "-whole-step": "whole step, full, bf16 weights",
    "-lora-whole-step": "whole step, LoRA, fp32 adapters on a bf16 base",
    "-lora-autocast-whole-step": "the same under bf16 autocast",
}
SIZES = {"2k": 2048, "4k": 4096, "8k": 8192}
GRAPHS, WITHOUT, COMPILED = "packfree", "packfree, no graphs", "packfree, layers compiled"
HEAD = ("one step", "tokens", "without", "with graphs", "sum of kernels", "host, without; with")
Rows = dict[tuple[str, str, str], dict[str, Any]]


def results(folder: Path = FOLDER) -> list[Path]:
    """Return the results, the newest first."""
    return sorted(folder.glob("*.jsonl"), reverse=True)


def read(path: Path) -> tuple[dict[str, Any], Rows]:
    """Return what the rows were made with, and {(kind, size, variant): row}."""
    about, *lines = map(json.loads, path.read_text().splitlines())
    rows: Rows = {}
    for line in lines:
        size, kind = line["workload"].removeprefix("2b-").split(",")[0][:2], ""
        kind = line["workload"].removeprefix(f"2b-{size}").split(",")[0]
        rows[kind, size, line["variant"]] = line
    return about, rows


def tables() -> dict[tuple[str, str], str]:
    """Return {(page, mark): what the page has to hold there}, as `report.tables` does."""
    image = f"![Time of a step over its tokens]({Path(PLOT).name})\n"
    return {MARK: "\n".join((image, *map(table, results())))}


def table(path: Path) -> str:
    """Return the rows of one GPU, under what they were made with, as Markdown."""
    about, rows = read(path)
    versions = about["versions"]
    with_versions = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "triton", "flash-qla")
    )
    made = (
        f"Made on {about['date']} on one {about['machine']} with {with_versions}; every number is "
        f"in `tests/benchmarks/results/short/{path.name}`.\n"
    )
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for kind, title in KINDS.items():
        for size, tokens in SIZES.items():
            mine, without = (rows.get((kind, size, name)) for name in (GRAPHS, WITHOUT))
            if mine and without:
                cells = title, f"{tokens:,}", *_cells(mine, without)
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join((made, *lines)) + "\n" + _compiled(rows)


def _compiled(rows: Rows) -> str:
    """Say what the steps take whose layers torch.compile has compiled; nothing if none was timed."""
    said = [
        f"{KINDS[kind]}, {SIZES[size]:,} tokens, {row['ms']:.0f} ms"
        for (kind, size, name), row in rows.items()
        if name == COMPILED and "ms" in row
    ]
    return f"\nWith each layer compiled by torch.compile: {'; '.join(said)}.\n" if said else ""


def _cells(mine: dict[str, Any], without: dict[str, Any]) -> tuple[str, ...]:
    def said(row: dict[str, Any]) -> str:
        memory = f", {row['reserved_gib']:.0f} GiB" if "reserved_gib" in row else ""
        return f"{row['ms']:.0f} ms{memory}"

    host = f"{without['host_ms']:.0f}; {mine['host_ms']:.0f} ms"
    return said(without), said(mine), f"{without['kernels_ms']:.0f} ms", host


def draw(path: Path, target: Path) -> None:
    """Draw the steps' times over their tokens, and the sum of their kernels as the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    about, rows = read(path)
    kinds = "-whole-step", "-lora-whole-step"
    figure, sides = pyplot.subplots(1, len(kinds), figsize=(9, 3.4), sharey=True)
    for axes, kind in zip(sides, kinds, strict=True):
        for variant, colour in ((WITHOUT, "#999999"), (GRAPHS, "#0072B2")):
            _line(axes, rows, kind, variant, "ms", color=colour, marker="o", label=variant)
        _line(axes, rows, kind, WITHOUT, "kernels_ms", ls=":", color="black", label="its kernels")
        axes.set_title(KINDS[kind], fontsize=9, loc="left")
        axes.set(xlabel="tokens of a step", xticks=[*SIZES.values()])
        axes.spines[["top", "right"]].set_visible(False)
    sides[0].set_ylabel("ms")
    sides[0].set_ylim(bottom=0)
    sides[0].legend(frameon=False, fontsize=8)
    title = f"One step with another packing each time, one {about['machine']}, {about['date']}"
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(target, dpi=90)


def _line(axes: Any, rows: Rows, kind: str, variant: str, key: str, **style: Any) -> None:
    found = [(SIZES[size], rows.get((kind, size, variant))) for size in SIZES]
    points = [(tokens, row[key]) for tokens, row in found if row]
    axes.plot(*zip(*points, strict=True), **style)
