"""The table of releases, for the console and for docs: in full, and in one sentence."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

from packaging.version import Version

from tests.compat.measure import Outcome

DOCS = Path(__file__).parents[2] / "docs"
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


def write(row: tuple[str, ...]) -> None:
    """Put a row into docs/compat_full.md, for the release's last one, and the sentence into docs/compatibility.md."""
    rows = sorted({**{held[0]: held for held in rows_held()}, row[0]: row}.values(), key=lambda cells: Version(cells[0]))
    lines = [
        "Written by `python -m tests.compat.run --all --write`: worst relative RMS of logits / gradients, CPU, fp32.",
        "",
        *("| " + " | ".join(cells) + " |" for cells in (HEAD, ("---",) * len(HEAD), *rows)),
    ]
    _put(DOCS / "compat_full.md", "\n".join(lines))
    _put(DOCS / "compatibility.md", sentence(rows))


def rows_held() -> list[tuple[str, ...]]:
    """Return the rows that docs/compat_full.md has."""
    lines = (DOCS / "compat_full.md").read_text().split(MARK)[1].splitlines()
    return [cells for line in lines if (cells := _cells(line)) and cells[0][0].isdigit()]


def sentence(rows: list[tuple[str, ...]]) -> str:
    """Return from which release to which it is exact, which releases are not, and the worst of the numbers."""
    failing = [row[0] for row in rows if any(cell.startswith("fails") for cell in row[3:])]
    pairs = [cell.split()[1::2] for row in rows for cell in row[3:] if cell.startswith("exact")]
    worst = " and ".join(f"{max(map(float, column)):.0e}" for column in zip(*pairs))
    verdict = f"not exact on {', '.join(failing)}" if failing else f"exact on every one, worst {worst}"
    releases = f"transformers {rows[0][0]} to {rows[-1][0]}, {len(rows)} releases"
    return f"{releases}: {verdict} (relative RMS of logits and of gradients)."


def _put(page: Path, text: str) -> None:
    page.write_text(re.sub(f"{MARK}.*?{MARK}", lambda _: f"{MARK}\n{text}\n{MARK}", page.read_text(), flags=re.S))


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip("|").split("|")) if line.startswith("|") else ()
