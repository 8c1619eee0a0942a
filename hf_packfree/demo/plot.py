"""The demo's picture.  Colours are Okabe and Ito's, which colour-blind people tell apart; lines differ in dashes too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hf_packfree.bench.plot import BLUE, GREY, bars
from hf_packfree.demo.report import LEAKING, LOSS_LIMIT, PACKED, PADDED, DemoReport

ORANGE, GREEN = "#D55E00", "#009E73"
STYLES: dict[str, dict[str, Any]] = {
    PADDED: {"color": GREY, "linestyle": "-", "linewidth": 6, "alpha": 0.45},
    PACKED: {"color": BLUE, "linestyle": "--", "linewidth": 1.8},
    LEAKING: {"color": ORANGE, "linestyle": ":", "linewidth": 1.8},
}
FLOOR = 1e-9
"""Where a difference of exactly zero is drawn on a logarithmic axis."""


def draw(report: DemoReport, path: Path) -> None:
    """Write the picture to `path`."""
    figure = Figure(figsize=(13, 8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    (loss, leak), (difference, speed) = figure.subplots(2, 2)
    _loss(loss, difference, report)
    _leak(leak, report)
    bars(speed, {row.name: row.tokens_per_second for row in report.trainings}, [GREY, BLUE, ORANGE])
    speed.set(xlabel="real tokens per second")
    speed.set_title("Speed (longer is better)", loc="left")
    difference.locator_params(axis="x", integer=True)
    loss.locator_params(axis="x", integer=True)
    for axes in (loss, leak, difference):
        axes.grid(color="#DDDDDD")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _loss(above: Any, below: Any, report: DemoReport) -> None:
    """Draw the loss curves over each other, and their differences to the padded one below."""
    steps = range(1, len(report.padded.losses) + 1)
    for training in report.trainings:
        style = STYLES[training.name]
        above.plot(steps, training.losses, label=training.name, **style)
        if training is not report.padded:
            differences = [max(value, FLOOR) for value in training.differences(report.padded)]
            below.plot(steps, differences, marker="o", markersize=3, **style)
    above.set(xlabel="optimizer step", ylabel="loss [nats per token]")
    above.set_title("Training loss on the same documents in the same order", loc="left")
    above.legend(frameon=False)
    _limit(below, LOSS_LIMIT)
    below.set(yscale="log", ylabel="relative difference", xlabel="optimizer step")
    below.set_title("Difference to the padded training (zero is drawn at 1e-9)", loc="left")


def _leak(axes: Any, report: DemoReport) -> None:
    """Draw the distance of each document's logits from those of the document alone."""
    found = report.verification
    places = range(1, len(found.lengths) + 1)
    rows = [(LEAKING, found.unpatched, ORANGE, "o"), (PACKED, found.patched, BLUE, "s")]
    for title, measured, colour, marker in rows:
        if measured is not None:
            axes.plot(places, [max(value, FLOOR) for value in measured.per_document], marker, color=colour, label=title)
    _limit(axes, found.limits.logits)
    axes.set(yscale="log", ylim=(FLOOR, 30), ylabel="relative RMS error of logits", xlabel="document (its tokens)")
    axes.set_xticks(places, [f"{number}\n({length})" for number, length in zip(places, found.lengths, strict=True)])
    axes.set_title("The leak: packed documents against documents alone", loc="left")
    axes.legend(loc="center right", frameon=False)


def _limit(axes: Any, value: float) -> None:
    axes.axhline(value, color=GREEN, linewidth=1.2)
    where = axes.get_yaxis_transform()
    axes.annotate(f" {value:.0e}\n allowed", (1.0, value), xycoords=where, color=GREEN, va="center")
