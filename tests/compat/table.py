"""The table of releases, for the console and for README.md."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

from tests.compat.measure import Outcome

README = Path(__file__).parents[2] / "README.md"
MARK = "<!-- compat -->"
FAMILIES = {"qwen3_5": "Qwen3.5", "qwen3_5_moe": "Qwen3.5-MoE", "qwen3_next": "Qwen3-Next"}
CELLS = [(family, attention) for family in FAMILIES for attention in ("sdpa", "eager")]
HEAD = ("transformers", "`kernels`", *(f"{FAMILIES[family]} {attention}" for family, attention in CELLS))


def row_of(version: str, kernels: str | None, outcomes: list[Outcome]) -> tuple[str, ...]:
    """Return one row: the release, the `kernels` it was run with, then per family and attention the worst of all runs."""
    return (version, kernels or "none", *(_cell(family, attention, outcomes) for family, attention in CELLS))


def _cell(family: str, attention: str, outcomes: list[Outcome]) -> str:
    found = [outcome.errors[family, attention] for outcome in outcomes if (family, attention) in outcome.errors]
    failed = [name for outcome in outcomes for name in outcome.failed if f"[{family}-" in name and attention in name]
    verdict = "fails" if failed or len(found) < len(outcomes) else "exact"
    return " ".join([verdict, *(" / ".join(f"{max(column):.0e}" for column in zip(*found)) for _ in found[:1])])


def write_readme(rows: list[tuple[str, ...]], torch: str) -> None:
    """Put the table between the two marks in README.md, with the day it was made."""
    day = datetime.date.today().isoformat()
    lines = [
        f"Made on {day} by `python -m tests.compat.run --all --readme` with torch {torch} on a CPU. Worst relative RMS of "
        "logits / gradients over every input form, with and without kernel packages.",
        "",
        *("| " + " | ".join(row) + " |" for row in (HEAD, ("---",) * len(HEAD), *rows)),
    ]
    text = README.read_text()
    README.write_text(re.sub(f"{MARK}.*?{MARK}", lambda _: "\n".join([MARK, *lines, MARK]), text, flags=re.S))
