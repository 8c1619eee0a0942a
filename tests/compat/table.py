"""The table of releases, for the console and for README.md."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

from packaging.version import Version

from tests.compat.measure import Outcome

README = Path(__file__).parents[2] / "README.md"
MARK = "<!-- compat -->"
FAMILIES = {"qwen3_5": "Qwen3.5", "qwen3_5_moe": "Qwen3.5-MoE", "qwen3_next": "Qwen3-Next"}
CELLS = [(family, attention) for family in FAMILIES for attention in ("sdpa", "eager")]
HEAD = ("transformers", "made on", "`kernels`", *(f"{FAMILIES[family]} {attention}" for family, attention in CELLS))


def row_of(version: str, kernels: str | None, outcomes: list[Outcome]) -> tuple[str, ...]:
    """Return one row: the release, today, its `kernels`, then per family and attention the worst of all runs."""
    cells = (_cell(family, attention, outcomes) for family, attention in CELLS)
    return (version, datetime.date.today().isoformat(), kernels or "none", *cells)


def _cell(family: str, attention: str, outcomes: list[Outcome]) -> str:
    found = [outcome.errors[family, attention] for outcome in outcomes if (family, attention) in outcome.errors]
    failed = [name for outcome in outcomes for name in outcome.failed if f"[{family}-" in name and attention in name]
    verdict = "fails" if failed or len(found) < len(outcomes) else "exact"
    return " ".join([verdict, *(" / ".join(f"{max(column):.0e}" for column in zip(*found)) for _ in found[:1])])


def write_readme(row: tuple[str, ...]) -> None:
    """Put a row into the table between the two marks in README.md, in the place of the release's last one."""
    text = README.read_text()
    table = text.split(MARK)[1]
    held = {cells[0]: cells for line in table.splitlines() if (cells := _cells(line)) and cells[0][0].isdigit()}
    rows = sorted({**held, row[0]: row}.values(), key=lambda cells: Version(cells[0]))
    lines = [
        "Written by `python -m tests.compat.run --all --readme`: worst relative RMS of logits / gradients, CPU, fp32.",
        "",
        *("| " + " | ".join(cells) + " |" for cells in (HEAD, ("---",) * len(HEAD), *rows)),
    ]
    README.write_text(re.sub(f"{MARK}.*?{MARK}", lambda _: "\n".join([MARK, *lines, MARK]), text, flags=re.S))


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip("|").split("|")) if line.startswith("|") else ()
