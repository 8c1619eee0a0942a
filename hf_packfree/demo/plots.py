"""The demo's pictures.  Colours are Okabe and Ito's, which colour-blind people tell apart; lines differ in dashes too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

from hf_packfree.demo.report import JUDGED_STEPS, LOSS_LIMIT, DemoReport, Training

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#555555"
COLOURS = {"padded": GREY, "packed": BLUE, "unpatched": ORANGE}
FLOOR = 1e-9
"""Where a difference of exactly zero is drawn on a logarithmic axis."""

STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def draw(report: DemoReport, folder: Path) -> list[Path]:
    """Write the three pictures into `folder` and return their paths."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    pictures = {"loss.png": (_loss, (8, 7)), "leak.png": (_leak, (9, 4.5)), "cost.png": (_cost, (9, 4))}
    paths = []
    for name, (paint, size) in pictures.items():
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=size, dpi=150)
            FigureCanvasAgg(figure)
            paint(figure, report)
            figure.savefig(folder / name)
        paths.append(folder / name)
    return paths


def _loss(figure: Any, report: DemoReport) -> None:
    """Draw the loss curves over each other, and their differences to the padded one below."""
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    steps = range(1, len(report.padded.losses) + 1)
    styles = {"padded": ("-", 6, 0.45), "packed": ("--", 1.8, 1.0), "unpatched": (":", 1.8, 1.0)}
    for training in report.trainings:
        dashes, width, strength = styles[training.name]
        look = {"color": COLOURS[training.name], "linestyle": dashes, "linewidth": width, "alpha": strength}
        above.plot(steps, training.losses, label=training.title, **look)
        if training is not report.padded:
            differences = [max(value, FLOOR) for value in training.loss_differences(report.padded)]
            below.plot(steps, differences, marker="o", markersize=3, label=training.title, **look)
    above.set(title="Training loss on the same documents in the same order", ylabel="loss [nats per token]")
    above.legend()
    _limit(below, LOSS_LIMIT)
    if len(steps) > JUDGED_STEPS:
        below.axvline(JUDGED_STEPS, color=GREEN, linewidth=1.2)
    below.set(title="Difference to the padded training (none at all is drawn at 1e-9)", yscale="log")
    below.set(ylabel="relative difference", xlabel="optimizer step")


def _limit(axes: Any, value: float) -> None:
    axes.axhline(value, color=GREEN, linewidth=1.2)
    place = (1.0, value)
    axes.annotate(f" {value:.0e}\n allowed", place, xycoords=axes.get_yaxis_transform(), color=GREEN, va="center")


def _leak(figure: Any, report: DemoReport) -> None:
    """Draw how far each document's logits are from those of the document run alone."""
    axes = figure.subplots()
    lengths, found = report.verification["lengths"], report.verification
    places = range(1, len(lengths) + 1)
    rows = [("packed, stock", found["stock"], ORANGE, "o"), ("packed, hf_packfree", found["patched"], BLUE, "s")]
    for title, measured, colour, marker in rows:
        if measured is not None:
            values = [max(value, FLOOR) for value in measured["per_document"]]
            axes.plot(places, values, marker, color=colour, markersize=8, label=title)
    _limit(axes, found["limits"]["logits"])
    axes.set(yscale="log", ylim=(1e-9, 30), ylabel="relative RMS error of logits")
    axes.set(xlabel="document in the row (its tokens); nothing lies before the first")
    axes.set_xticks(places, [f"{number}\n({length})" for number, length in zip(places, lengths, strict=True)])
    axes.set_title("The leak: a packed document against the same document run alone")
    axes.legend(loc="center right", bbox_to_anchor=(1.0, 0.58))


def _cost(figure: Any, report: DemoReport) -> None:
    """Draw speed and memory of the three trainings side by side."""
    speed, memory = figure.subplots(1, 2, gridspec_kw={"wspace": 0.1})
    _bars(speed, report.trainings, [training.tokens_per_second for training in report.trainings], "{:,.0f}")
    speed.set(title="Speed (longer is better)", xlabel="real tokens per second")
    _bars(memory, report.trainings, [training.peak_memory_mib for training in report.trainings], "{:,.0f}")
    memory.set(title="Memory (shorter is better)", xlabel="peak above the loaded model [MiB]")
    memory.set_yticklabels([])


def _bars(axes: Any, trainings: tuple[Training, ...], values: list[float], form: str) -> None:
    for place, (training, value) in enumerate(zip(trainings, values, strict=True)):
        hatch = "//" if training.name == "unpatched" else ""
        axes.barh(place, value, color=COLOURS[training.name], hatch=hatch, edgecolor="white", height=0.6)
        axes.annotate(
            f"{form.format(value)}  ({value / values[0]:.2g}x)" if place and values[0] else form.format(value),
            (value, place), (4, 0), textcoords="offset points", va="center",
        )
    axes.set_yticks(range(len(trainings)), [training.title for training in trainings])
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.4 or 1.0)
    axes.grid(axis="y", visible=False)
    axes.locator_params(axis="x", nbins=4)
