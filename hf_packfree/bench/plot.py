"""The benchmark's picture: time and memory of every candidate, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_packfree.bench.report import BASE, BenchReport

BLUE, GREY = "#0072B2", "#999999"
"""Okabe and Ito's blue for patched, grey for stock: told apart by colour-blind people and in print."""


def draw(report: BenchReport, path: Path) -> None:
    """Write the picture to `path`; needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    time, memory = figure.subplots(1, 2, sharey=True)
    rows = report.candidates
    _bars(time, [(row.name, None if row.median is None else row.median * 1e3) for row in rows])
    time.axvline(report.floor * 1e3, color="black", linewidth=1, linestyle=":")
    time.set_title("One step (dotted: floor)", loc="left", fontsize=10)
    time.set_xlabel("milliseconds, median")
    _bars(memory, [(row.name, row.peak_mib) for row in rows])
    memory.set_title("Peak memory of a step", loc="left", fontsize=10)
    memory.set_xlabel("MiB above the loaded model")
    figure.suptitle(f"{report.model}, {report.documents}, {report.fill:.0%} real tokens", fontsize=11)
    figure.savefig(path)


def _bars(axes: Any, rows: list[tuple[str, float | None]]) -> None:
    base = next((value for name, value in rows if name == BASE), None)
    for place, (name, value) in enumerate(rows):
        axes.barh(place, value or 0.0, color=BLUE if name.startswith("patched") else GREY, height=0.6)
        text = _label(value, None if name == BASE else base)
        axes.annotate(text, (value or 0.0, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    axes.set_xlim(0, max(value or 0.0 for _, value in rows) * 1.4 or 1.0)
    axes.locator_params(axis="x", nbins=5)
    axes.spines[["top", "right"]].set_visible(False)


def _label(value: float | None, base: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:,.0f}" + (f"  ({value / base:.2f}x)" if base else "")
