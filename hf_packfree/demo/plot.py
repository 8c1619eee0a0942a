"""The demo's picture. Colours are Okabe and Ito's, different for colour-blind people; lines
differ in dashes too.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from hf_packfree.bench.bars import BLUE, GREY, bars
from hf_packfree.demo.results import LEAKING, LOSS_LIMIT, PACKED, PADDED, DemoReport, Influence

ORANGE = "#D55E00"
GREEN = "#009E73"
STYLES: dict[str, dict[str, Any]] = {
    PADDED: {"color": GREY, "linestyle": "-", "linewidth": 6, "alpha": 0.45},
    LEAKING: {"color": ORANGE, "linestyle": ":", "linewidth": 1.8},
    PACKED: {"color": BLUE, "linestyle": "--", "linewidth": 1.8},
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
"""The value at which a difference of exactly zero is drawn on a logarithmic axis."""


def draw(report: DemoReport, path: Path) -> None:
    """Write the picture to `path`."""
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(14, 8), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(2, 3, width_ratios=(1, 1, 1.25))
        (before, after, text), (difference, speed, memory) = panels
        image = draw_map(
            before, report.leaking, "Packed by transformers: documents read each other"
        )
        draw_map(after, report.exact, "Packed with hf_packfree: each reads itself")
        figure.colorbar(image, ax=[before, after], label="relative change of the reader's logits")
        _words(text, report)
        _loss(difference, report)
        _costs(speed, memory, report)
        versions = ", ".join(f"{name} {found}" for name, found in report.versions.items() if found)
        made = f"{report.parameters:,} parameters, {report.device}; {versions}"
        figure.suptitle(
            f"packfree demo: the same {len(report.lengths)} documents, padded and packed\n"
            f"{fill(made, 130)}",
            fontsize=12,
        )
        figure.savefig(path)


def draw_map(axes: Any, found: Influence, title: str) -> Any:
    """Draw whose tokens change whose predictions; predictions that do not change at all stay
    white.
    """
    scale = LogNorm(1e-6, 1.0)
    values = [[value if value > 0 else float("nan") for value in row] for row in found.matrix]
    image = axes.imshow(values, cmap="viridis_r", norm=scale)
    axes.set_title(title, fontsize=10)
    axes.set(
        xlabel="document whose tokens are replaced", ylabel="document whose predictions change"
    )
    axes.grid(visible=False)
    places = range(len(found.matrix))
    axes.set_xticks(places, [place + 1 for place in places])
    axes.set_yticks(places, [place + 1 for place in places])
    return image


def _words(axes: Any, report: DemoReport) -> None:
    """Write the trained model's continuations of a prompt."""
    found, gradients = report.continuations, report.verification.unpatched
    lines = [("The same beginning, continued greedily", "black"), (_short(found.prompt), GREY)]
    lines += [("", "black"), ("alone", "black"), (_short(found.alone), GREEN)]
    for title, texts in (("transformers", found.unpatched), ("hf_packfree", found.patched)):
        for place, text in zip("AB", texts):
            same = text == found.alone
            lines.append((f"{title}, after neighbour {place}", "black"))
            lines.append((_short(text), GREEN if same else ORANGE))
    if gradients is not None and gradients.gradients is not None:
        lines += [
            ("", "black"),
            (f"Gradients, worst parameter: {gradients.gradients:.0%} off", ORANGE),
        ]
        lines.append((f"with hf_packfree: {report.verification.patched.gradients:.0e}", GREEN))
    for number, (line, colour) in enumerate(lines):
        height = 1 - (number + 0.5) / len(lines)
        axes.text(0, height, line, color=colour, fontsize=9, family="monospace", va="center")
    axes.set_axis_off()


def _short(text: str) -> str:
    # matplotlib would take a dollar sign for the beginning of a formula
    line = " ".join(text.split()).replace("$", r"\$")
    return f"  {line if len(line) <= 38 else line[:36] + ' …'}"


def _loss(axes: Any, report: DemoReport) -> None:
    """Draw the relative loss differences of both packed trainings to the padded one."""
    steps = range(1, len(report.padded.losses) + 1)
    for training in (report.unpatched, report.packed):
        differences = [max(value, FLOOR) for value in training.differences(report.padded)]
        style = STYLES[training.name]
        axes.plot(steps, differences, marker="o", markersize=3, label=training.name, **style)
    axes.locator_params(axis="x", integer=True)
    axes.set_title("Training loss: difference to the padded training", fontsize=10)
    axes.set(xlabel="optimizer step", ylabel="relative difference", yscale="log")
    # room for the legend next to the lines
    axes.margins(y=0.2)
    axes.legend(fontsize=8)
    _limit(axes, LOSS_LIMIT)


def _costs(speed: Any, memory: Any, report: DemoReport) -> None:
    """Draw tokens per second and memory of the trainings, and how they compare with the padded
    one.
    """
    padded, names = report.padded, [row.name for row in report.trainings]
    colours = [STYLES[name]["color"] for name in names]
    speeds = {row.name: row.tokens_per_second for row in report.trainings}
    peaks = {row.name: row.peak_mib for row in report.trainings}
    faster = {name: f"{speeds[name] / padded.tokens_per_second:.1f} x" for name in names}
    shares = {name: f"{peaks[name] / padded.peak_mib:.0%}" for name in names}
    bars(speed, speeds, colours, faster)
    bars(memory, peaks, colours, shares)
    share = f"{padded.real_share:.0%} of the padded tokens are real"
    speed.set_title(f"Real tokens per second (longer is better)\n{share}", fontsize=10)
    memory.set_title("Peak memory of a step, MiB\n(shorter is better)", fontsize=10)
    for axes in (speed, memory):
        axes.grid(visible=False)


def _limit(axes: Any, value: float) -> None:
    axes.axhline(value, color=GREEN, linewidth=1.2)
    where = axes.get_yaxis_transform()
    axes.annotate(f" {value:.0e}\n allowed", (1.0, value), xycoords=where, color=GREEN, va="center")
