"""The benchmark's picture: time and memory of every candidate, side by side. The only file here
that needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_packfree.bench.candidates import BenchReport

BLUE = "#0072B2"
"""For patched candidates; of Okabe and Ito's palette, distinct from grey for colour-blind people
and in print.
"""
GREY = "#999999"
"""For unpatched candidates."""


def draw(report: BenchReport, path: Path) -> None:
    """Write the picture to `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    time, memory = figure.subplots(1, 2)
    rows = report.candidates
    colours = [BLUE if row.name.startswith("patched") else GREY for row in rows]
    names = [row.name for row in rows]
    faster = {name: found for name in names if (found := report.faster(name)) is not None}
    shares = {name: found for name in names if (found := report.memory_share(name)) is not None}
    milliseconds = {row.name: None if row.median is None else row.median * 1e3 for row in rows}
    bars(time, milliseconds, colours, {name: f"{x:.2f} x faster" for name, x in faster.items()})
    time.axvline(report.floor * 1e3, color="black", linewidth=1, linestyle=":")
    time.set_title("One step (dotted: floor)", loc="left", fontsize=10)
    time.set_xlabel("milliseconds, median")
    peaks = {row.name: row.peak_mib for row in rows}
    bars(memory, peaks, colours, {name: f"{share:.0%}" for name, share in shares.items()})
    memory.set_title("Peak memory of a step", loc="left", fontsize=10)
    memory.set_xlabel("MiB above the loaded model")
    memory.set_yticklabels([])
    figure.suptitle(
        f"{report.model}, {report.documents}, {report.fill:.0%} real tokens", fontsize=11
    )
    figure.savefig(path)


def bars(
    axes: Any,
    values: Mapping[str, float | None],
    colours: Sequence[str],
    compared: Mapping[str, str],
) -> None:
    """Draw a horizontal bar per name, top to bottom, labelled with its value and, from the second
    on, with how it compares to the first.
    """
    for place, ((name, value), colour) in enumerate(zip(values.items(), colours, strict=True)):
        axes.barh(place, value or 0.0, color=colour, height=0.6)
        text = (
            "not measured"
            if value is None
            else f"{value:,.0f}" + (f"  ({compared[name]})" if place and name in compared else "")
        )
        axes.annotate(
            text, (value or 0.0, place), (4, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_yticks(range(len(values)), list(values))
    axes.invert_yaxis()
    axes.set_xlim(0, max(value or 0.0 for value in values.values()) * 1.4 or 1.0)
    axes.locator_params(axis="x", nbins=5)
    axes.spines[["top", "right"]].set_visible(False)
