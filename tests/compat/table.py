"""The table of releases, for the console and for docs: in full, and in one sentence."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

from packaging.version import Version

from tests.compat.measure import DOCUMENTS, Outcome

DOCS = Path(__file__).parents[2] / "docs"
MARK = "<!-- compat -->"
FAMILIES = {
    "qwen3_5": "Qwen3.5",
    "qwen3_5_moe": "Qwen3.5-MoE",
    "qwen3_next": "Qwen3-Next",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL-MoE",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_omni_moe": "Qwen3-Omni-MoE",
}
TEXT_ALONE = ("qwen3_next",)
CELLS = [
    (family, documents)
    for documents in DOCUMENTS
    for family in FAMILIES
    if documents == "text" or family not in TEXT_ALONE
]
ABOUT = ("transformers", "made on", "`kernels`")
OTHERS = "other families that the release has"
HEAD = (
    *ABOUT,
    *(
        FAMILIES[family] + (", media" if documents == "media" else "")
        for family, documents in CELLS
    ),
    OTHERS,
)
NOT_RUN = "not run"


def row_of(version: str, kernels: str | None, outcomes: list[Outcome]) -> tuple[str, ...]:
    """Return one row: the release, today, its `kernels`, then per family and documents the worst
    of all runs, and how many others there are.
    """
    cells = (_cell(family, documents, outcomes) for family, documents in CELLS)
    today = datetime.date.today().isoformat()
    return (version, today, kernels or "none", *cells, _others(outcomes))


def _others(outcomes: list[Outcome]) -> str:
    """Count the families that have no column, with the worst of them; name those that fail."""
    found = [
        (key[0], errors)
        for outcome in outcomes
        for key, errors in outcome.errors.items()
        if key[0] not in FAMILIES
    ]
    spoiled = {family for outcome in outcomes for family, _ in outcome.spoiled} - FAMILIES.keys()
    said = f"fails: {', '.join(sorted(spoiled))}; " if spoiled else ""
    if not found:
        return said or NOT_RUN
    worst = " / ".join(f"{max(column):.0e}" for column in zip(*(errors for _, errors in found)))
    return f"{said}{len({family for family, _ in found})} families, {worst}"


def _cell(family: str, documents: str, outcomes: list[Outcome]) -> str:
    spoiled, found = False, []
    for outcome in outcomes:
        measured = {
            key[2]: errors
            for key, errors in outcome.errors.items()
            if key[:2] == (family, documents)
        }
        spoiled |= (
            not {"sdpa", "eager"} <= measured.keys() or (family, documents) in outcome.spoiled
        )
        found += measured.values()
    return " ".join(
        [
            *["fails"] * spoiled,
            *(" / ".join(f"{max(column):.0e}" for column in zip(*found)) for _ in found[:1]),
        ]
    )


def write(row: tuple[str, ...]) -> None:
    """Put a row into docs/compat_full.md, for the release's last one, and the sentence into
    docs/compatibility.md.
    """
    rows = sorted(
        {**{held[0]: held for held in rows_held()}, row[0]: row}.values(),
        key=lambda cells: Version(cells[0]),
    )
    first = len(ABOUT) + [documents for _, documents in CELLS].index("media")
    lines = [
        "Written by `python -m tests.compat.run --all --write`: worst relative RMS of logits / "
        "gradients, CPU, fp32.",
        *("", "Documents of text:", "", *_table([cells[:first] for cells in (HEAD, *rows)])),
        *(
            "",
            "Documents with images, videos and audio:",
            "",
            *_table([(cells[0], *cells[first:-1]) for cells in (HEAD, *rows)]),
        ),
        *(
            "",
            "Documents of text:",
            "",
            *_table([(cells[0], cells[-1]) for cells in (HEAD, *rows)]),
        ),
    ]
    _put(DOCS / "compat_full.md", "\n".join(lines))
    _put(DOCS / "compatibility.md", sentence(rows))


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    return [
        "| " + " | ".join(cells) + " |" for cells in (rows[0], ("---",) * len(rows[0]), *rows[1:])
    ]


def rows_held() -> list[tuple[str, ...]]:
    """Return the rows that docs/compat_full.md has, of all its tables."""
    held: dict[str, tuple[str, ...]] = {}
    for line in (DOCS / "compat_full.md").read_text().split(MARK)[1].splitlines():
        cells = _cells(line)
        if cells and cells[0][0].isdigit():
            held[cells[0]] = (*held[cells[0]], *cells[1:]) if cells[0] in held else cells
    # rows of before a column was there
    return [(*cells, *[NOT_RUN] * (len(HEAD) - len(cells))) for cells in held.values()]


def sentence(rows: list[tuple[str, ...]]) -> str:
    """Return from which release to which it is exact, which releases are not, and the worst of
    the numbers.
    """
    cells = {row[0]: [cell for cell in row[len(ABOUT) :] if cell != NOT_RUN] for row in rows}
    failing = [
        release
        for release, found in cells.items()
        if any(cell.startswith("fails") for cell in found)
    ]
    pairs = [
        cell.split(", ")[-1].split(" / ")
        for found in cells.values()
        for cell in found
        if not cell.startswith("fails")
    ]
    worst = " and ".join(f"{max(map(float, column)):.0e}" for column in zip(*pairs))
    verdict = (
        f"not exact on {', '.join(failing)}" if failing else f"exact on every one, worst {worst}"
    )
    releases = f"transformers {rows[0][0]} to {rows[-1][0]}, {len(rows)} releases"
    partly = sum(NOT_RUN in row for row in rows)
    rest = f" On {partly} of them not every family was run." if partly else ""
    return f"{releases}: {verdict} (relative RMS of logits and of gradients).{rest}"


def _put(page: Path, text: str) -> None:
    page.write_text(
        re.sub(
            f"{MARK}.*?{MARK}", lambda _: f"{MARK}\n{text}\n{MARK}", page.read_text(), flags=re.S
        )
    )


def _cells(line: str) -> tuple[str, ...]:
    return (
        tuple(cell.strip() for cell in line.strip("|").split("|")) if line.startswith("|") else ()
    )
