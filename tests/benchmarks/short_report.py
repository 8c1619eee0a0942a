"""The tables and the plot of steps of few tokens, which `tests.benchmarks.report` writes with its own,
from the results in results/short.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.benchmarks import report
from tests.benchmarks.families import SHORT_TITLES

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
TITLES = {
    **{f"2b-{size}{kind}": title for kind, title in KINDS.items() for size in SIZES},
    "2b-8x2048-padded": "trunk, full, 8 padded rows, 34% of them real",
    "9b-4k": "9B shape, 8 layers: trunk, full",
    "moe-4k": "MoE shape, 8 layers: trunk, full",
    **{f"2b-{size}-fla": "trunk, full, FLA's delta rule" for size in SIZES},
    **{f"{name}-4k": f"{title}: trunk, full" for name, title in SHORT_TITLES.items()},
}
"""{workload: what it is}, in the order of the table."""
GRAPHS, WITHOUT, COMPILED = "packfree", "packfree, no graphs", "packfree, layers compiled"
GIVEN = "packfree, lengths given"
HEAD = (
    "one step",
    "tokens",
    "without",
    "with graphs",
    "one after the other, without; with",
    "sum of kernels",
    "host, without; with",
)
Rows = dict[tuple[str, str], dict[str, Any]]


def results(folder: Path = FOLDER) -> list[Path]:
    """Return the results, the newest first."""
    return sorted(folder.glob("*.jsonl"), reverse=True)


def plotted() -> Path:
    """Return the newest result with whole steps."""
    kinds = "2b-2k-whole-step", WITHOUT
    return next(path for path in results() if kinds in read(path)[1])


def read(path: Path) -> tuple[dict[str, Any], Rows]:
    """Return what the rows were made with, and {(workload, variant): row}."""
    about, *lines = map(json.loads, path.read_text().splitlines())
    return about, {(line["workload"].split(",")[0], line["variant"]): line for line in lines}


def tables() -> dict[tuple[str, str], str]:
    """Return {(page, mark): what the page has to hold there}, as `report.tables` does."""
    image = f"![Time of a step over its tokens]({Path(PLOT).name})\n"
    # the plotted rows stand below their plot
    paths = sorted(results(), key=lambda path: path != plotted())
    return {MARK: "\n".join((image, *map(table, paths)))}


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
    lines: list[tuple[str, ...]] = [HEAD, ("---",) * len(HEAD)]
    for workload, title in TITLES.items():
        mine, without = (rows.get((workload, name)) for name in (GRAPHS, WITHOUT))
        if mine and without:
            lines.append((title, f"{_tokens(workload):,}", *_cells(mine, without)))
    # a column that no row has is none
    kept = [column for column in zip(*lines, strict=True) if any(column[2:])]
    drawn = [f"| {' | '.join(line)} |" for line in zip(*kept, strict=True)]
    return "\n".join((made, *drawn)).rstrip() + "\n" + _given(rows) + _compiled(rows)


def _given(rows: Rows) -> str:
    """Say what steps take whose boundaries are not read; nothing if none was timed."""
    said = [
        f"{TITLES[workload]}, {_tokens(workload):,} tokens, {row['in_a_row_ms']:.0f} ms"
        for (workload, name), row in rows.items()
        if name == GIVEN and "ms" in row
    ]
    return (
        "\nWith graphs, and a record that each step builds of the lengths, one after the other: "
        f"{'; '.join(said)}.\n"
        if said
        else ""
    )


def _compiled(rows: Rows) -> str:
    """Say what the steps take whose layers torch.compile has compiled; nothing if none was timed."""
    said = [
        f"{TITLES[workload]}, {_tokens(workload):,} tokens, {row['ms']:.0f} ms"
        for (workload, name), row in rows.items()
        if name == COMPILED and "ms" in row
    ]
    return f"\nWith each layer compiled by torch.compile: {'; '.join(said)}.\n" if said else ""


def _tokens(workload: str) -> int:
    """Return the tokens of a step, padding included."""
    size = workload.split("-")[1]
    return SIZES.get(size, 8 * 2048)


def _cells(mine: dict[str, Any], without: dict[str, Any]) -> tuple[str, ...]:
    def said(row: dict[str, Any]) -> str:
        memory = f", {row['reserved_gib']:.0f} GiB" if "reserved_gib" in row else ""
        return f"{row['ms']:.0f} ms{memory}"

    def both(key: str) -> str:
        pair = (without.get(key), mine.get(key))
        return f"{pair[0]:.0f}; {pair[1]:.0f} ms" if None not in pair else ""

    kernels = f"{without['kernels_ms']:.0f} ms"
    return said(without), said(mine), both("in_a_row_ms"), kernels, both("host_ms")


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
    found = [(tokens, rows.get((f"2b-{size}{kind}", variant))) for size, tokens in SIZES.items()]
    points = [(tokens, row[key]) for tokens, row in found if row]
    axes.plot(*zip(*points, strict=True), **style)
