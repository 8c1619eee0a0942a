"""The demo's picture. Colours are Okabe and Ito's, different for colour-blind people; lines
differ in dashes too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
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
LOOK: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "legend.frameon": False,
}
FLOOR = 1e-9
"""Where a difference of exactly zero is drawn on a logarithmic axis."""


def draw(report: DemoReport, path: Path) -> None:
    """Write the picture to `path`."""
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(13, 8), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        (loss, leak), (difference, speed) = figure.subplots(2, 2)
        _loss(loss, difference, report)
        _leak(leak, report)
        colours = [style["color"] for style in STYLES.values()]
        speeds = {row.name: row.tokens_per_second for row in report.trainings}
        faster = {name: f"{speeds[name] / speeds[PADDED]:.1f} x" for name in speeds}
        bars(speed, speeds, colours, faster)
        speed.set(title="Speed (longer is better)", xlabel="real tokens per second")
        speed.grid(visible=False)
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
    for axes in (above, below):
        axes.set(xlabel="optimizer step")
        axes.locator_params(axis="x", integer=True)
    above.set(
        title="Training loss on the same documents in the same order",
        ylabel="loss [nats per token]",
    )
    above.legend()
    below.set(
        title="Difference to the padded training (zero is drawn at 1e-9)",
        ylabel="relative difference",
        yscale="log",
    )
    _limit(below, LOSS_LIMIT)


def _leak(axes: Any, report: DemoReport) -> None:
    """Draw the distance of each document's logits from those of the document alone."""
    found = report.verification
    places = range(1, len(found.lengths) + 1)
    rows = [(LEAKING, found.unpatched, ORANGE, "o"), (PACKED, found.patched, BLUE, "s")]
    for title, measured, colour, marker in rows:
        if measured is not None:
            axes.plot(
                places,
                [max(value, FLOOR) for value in measured.per_document],
                marker,
                color=colour,
                label=title,
            )
    _limit(axes, found.limits.logits)
    axes.set(
        title="The leak: packed documents against documents alone", xlabel="document (its tokens)"
    )
    axes.set(yscale="log", ylim=(FLOOR, 30), ylabel="relative RMS error of logits")
    axes.set_xticks(
        places,
        [f"{number}\n({length})" for number, length in zip(places, found.lengths, strict=True)],
    )
    axes.legend(loc="center right")


def _limit(axes: Any, value: float) -> None:
    axes.axhline(value, color=GREEN, linewidth=1.2)
    where = axes.get_yaxis_transform()
    axes.annotate(f" {value:.0e}\n allowed", (1.0, value), xycoords=where, color=GREEN, va="center")
