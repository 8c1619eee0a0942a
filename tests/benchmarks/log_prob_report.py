"""The tables of docs/rl.md on log-probabilities and cross entropy, one for each result in
results/log-probs, the newest first, because what stands in a table is of one run;
`tests.benchmarks.report` writes them with its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks import report
from tests.benchmarks.timing import read_lines

FOLDER = report.RESULTS / "log-probs"
PAGE, MARK = "docs/rl.md", "log-probs"
SIZES = {"8k": "8,192 tokens", "32k": "32,768 tokens"}
KINDS = {
    "frozen, log p": "frozen head",
    "frozen, log p and entropy": "frozen, with entropy",
    "trained, log p": "trained head",
    "trained, log p and entropy": "trained, with entropy",
}
CUT = "cut-cross-entropy"
WHO = {
    "packfree": "packfree",
    "TRL": "TRL's chunked function",
    "Liger": "Liger",
    f"{CUT}, small gradients left out": f"{CUT}, its default: small gradients left out",
    CUT: f"{CUT}, exact",
}
LOSSES = {
    "packfree": "packfree",
    "Liger": "Liger, Triton",
    "Liger, kernels for Hopper": "Liger, kernels for Hopper",
}


def results(folder: Path = FOLDER) -> list[Path]:
    """Return every result, the newest first."""
    return sorted(folder.glob("*.jsonl"), reverse=True)


def tables(paths: Sequence[Path]) -> dict[tuple[str, str], str]:
    """Return {(page, mark): what the page has to hold there}, as `report.tables` does."""
    return {(PAGE, MARK): "\n".join(map(_tables, paths))}


def _tables(path: Path) -> str:
    about, *rows = read_lines(path)
    found = {(row["workload"], row["variant"]): row for row in rows}
    lines = [
        f"{report.origin(about, rows)}; every number is in "
        f"`tests/benchmarks/results/log-probs/{path.name}`.",
        *_log_probs(found),
        *_losses(found),
    ]
    return "\n".join(lines) + "\n"


Rows = dict[tuple[str, str], dict[str, Any]]


def _log_probs(found: Rows) -> Iterator[str]:
    """Yield the lines of a table; nothing of what was not timed."""
    kinds = [kind for kind in KINDS if any(name.endswith(f", {kind}") for _, name in found)]
    if not kinds:
        return
    yield ""
    yield f"| log-probabilities, ms (peak GiB) | {' | '.join(KINDS[kind] for kind in kinds)} |"
    yield "|---" * (len(kinds) + 1) + "|"
    for size, title in SIZES.items():
        yield f"| **{title}** {'| ' * len(kinds)}|"
        for who, name in WHO.items():
            cells = [found.get((f"rl-logprobs-{size}", f"{who}, {kind}")) for kind in kinds]
            if any(cells):
                yield f"| {name} | {' | '.join(map(_cell, cells))} |"


def _losses(found: Rows) -> Iterator[str]:
    if not any(workload.startswith("sft-loss-") for workload, _ in found):
        return
    yield ""
    yield f"| mean cross entropy, trained head, ms (peak GiB) | {' | '.join(SIZES.values())} |"
    yield "|---" * (len(SIZES) + 1) + "|"
    for who, name in LOSSES.items():
        cells = [found.get((f"sft-loss-{size}", who)) for size in SIZES]
        yield f"| {name} | {' | '.join(map(_cell, cells))} |"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "ms" in row:
        return f"{row['ms']:,.1f} ({row['peak_gib']:.1f})"
    kind = row.get("error", "skipped").split(":")[0]
    return {
        "OutOfMemoryError": "out of memory",
        "ImportError": "did not import",
        "ModuleNotFoundError": "did not import",
        "skipped": "",
    }.get(kind, kind)
