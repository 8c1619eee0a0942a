"""The tables of docs/parallel.md: steps of rows that two GPUs share, beside one GPU's.

python -m tests.benchmarks.context_parallel_report            # print
python -m tests.benchmarks.context_parallel_report --write    # into the page
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks import report
from tests.benchmarks.timing import read_lines

PAGE, MARK = "docs/parallel.md", "two-gpus"
FILES = sorted((report.RESULTS / "parallel").glob("*-x2-context-parallel*.jsonl"))
TITLES = {
    "2b-64k": "65,536 tokens",
    "2b-128k": "131,072 tokens, layers recomputed",
    "2b-64k-lora": "65,536 tokens, LoRA",
    "2b-64k-mtp": "65,536 tokens, multi-token prediction head",
    "2b-vl-44k": "44,432 tokens, vision-language model",
}
HEAD = ("2B shape", "one GPU", 'two, `gdn="state"`', 'two, `gdn="heads"`', "predicted, state")
Rows = dict[tuple[str, str], dict[str, Any]]


def main() -> None:
    """Print the tables, or write them where the page wants them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    found, page = tables(FILES), report.ROOT / PAGE
    if not parser.parse_args().write:
        print(found)
        return
    page.write_text(report.put_in(page.read_text(), MARK, found))


def tables(paths: Sequence[Path]) -> str:
    """Return one table for each file, under what it was measured on, as Markdown."""
    return "\n".join(map(table, paths))


def table(path: Path) -> str:
    """Return the rows of one file."""
    lines = read_lines(path)
    about = next(line for line in lines if line["workload"] == "machine")
    link = [line for line in lines if line["workload"] == "exchanges"][-1]
    rows: Rows = {(line["workload"], line["variant"]): line for line in lines}
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("torch", "transformers"))
    caption = (
        f"Two {about['machine']} of one host ({about['processor']}), {about['date']}, {versions}; "
        f"exchanges at {link['rate'] / 1e9:.0f} GB/s and {link['latency_s'] * 1e6:.0f} us "
        f"(`tests/benchmarks/results/parallel/{path.name}`):"
    )
    names = (key for key in rows if key[0].endswith("-cp1"))
    body = (_line(workload.removesuffix("-cp1"), documents, rows) for workload, documents in names)
    return "\n".join([caption, "", f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|", *body, ""])


def _line(workload: str, documents: str, rows: Rows) -> str:
    def of(way: str) -> dict[str, Any]:
        return rows.get((f"{workload}-cp2", f"{documents}, {way}"), {})

    tokens = TITLES[workload]
    title = tokens.split(", layers")[0] if "nothing recomputed" in documents else tokens
    cells = [
        _cell(rows[f"{workload}-cp1", documents]),
        *map(_cell, map(of, ("state", "heads"))),
        _predicted(of("state, predicted"), of("state")),
    ]
    return f"| {title}, {documents} | {' | '.join(cells)} |"


def _cell(row: dict[str, Any]) -> str:
    if "ms" not in row:
        return "out of memory" if "OutOfMemory" in row.get("error", "") else ""
    parts = [f"{row['ms']:,.0f} ms", f"{row['peak_gib']:.0f} GiB"]
    if "received_gib" in row:
        parts.append(f"{row['received_gib']:.1f} GiB received")
    if "efficiency" in row:
        parts.append(f"efficiency {row['efficiency']:.3f}")
    return ", ".join(parts)


def _predicted(row: dict[str, Any], measured: dict[str, Any]) -> str:
    if "ms" not in row or "ms" not in measured:
        return ""
    return f"{row['ms']:,.0f} ms ({100 * (row['ms'] / measured['ms'] - 1):+.1f}%)"


if __name__ == "__main__":
    main()
