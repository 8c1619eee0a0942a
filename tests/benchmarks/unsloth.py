"""Rows of the comparison with Unsloth, from the lines of JSON that its script leaves, in the form
of the other rows.

    python -m tests.benchmarks.unsloth --lines unsloth.jsonl --out DIR

Appends to DIR/rows.jsonl, the folder of a run of `tests.benchmarks.run_all` on the same machine,
whose `--assemble` makes one result of both. Unsloth's rows are the variant "unsloth"; ours, timed
by the same script in the same call, "packfree, beside unsloth", which tell whether it is fair: they
have to agree with the rows of `tests.benchmarks.measure`.

Each line has a job (the engine and its settings), a precision (amp: adapters in fp32 under bf16
autocast) and a row. Lines of other jobs and precisions, those that were timed on another GPU than
the last and those without a time are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.timing import Results, read_lines

VARIANTS = {"unsloth": "unsloth", "packfree": "packfree, beside unsloth"}
WORKLOADS = {
    "docs": "2b-docs-lora-autocast",
    "8k": "2b-8k-lora-autocast",
    "32k": "2b-32k-lora-autocast",
    "trainer": "unsloth-8k-trainer",
}
PRECISION = "amp"
EAGER = (
    "on torch 2.10 and 2.11 Unsloth keeps packed mixers out of its compiled blocks, which its own "
    "comment puts at 6 to 20% of a step"
)
KEPT = ("ms", "ms_min", "ms_max", "runs", "real_tokens", "documents", "peak_gib", "loss")
PACKAGES = ("unsloth", "unsloth_zoo", "transformers", "torch", "triton", "trl", "peft")


def converted(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of some lines, of each name the last that was timed."""
    machine = next((line["gpu"] for line in reversed(lines) if "gpu" in line), None)
    here = [line for line in lines if line.get("gpu") == machine]
    versions = {
        line["job"]: {name: line[name] for name in PACKAGES if name in line}
        for line in here
        if line["row"] == "versions"
    }
    found = {
        (row["workload"], row["variant"]): row
        for line in here
        if _is_shown(line)
        for row in [_row(line, versions.get(line["job"], {}))]
    }
    return list(found.values())


def _is_shown(line: dict[str, Any]) -> bool:
    known = line["job"] in VARIANTS and line["row"] in WORKLOADS
    return known and line.get("precision") == PRECISION and "ms" in line


def _row(line: dict[str, Any], versions: dict[str, Any]) -> dict[str, Any]:
    theirs = line["job"] == "unsloth"
    notes = [EAGER if theirs and _is_eager(versions) else "", line.get("packing", "")]
    note = "; ".join(part for part in notes if part)
    return {
        "workload": WORKLOADS[line["row"]],
        "variant": VARIANTS[line["job"]],
        **{name: line[name] for name in KEPT if name in line},
        "real_tokens_per_s": line["tok_s"],
        "lora": "fp32",
        "autocast": "bf16",
        "whole_step": True,
        "machine": line["gpu"],
        "versions": versions,
        "script": "tests.benchmarks.unsloth",
        **({"note": note} if note else {}),
    }


def _is_eager(versions: dict[str, Any]) -> bool:
    return str(versions.get("torch", "")).startswith(("2.10", "2.11"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Append the rows of a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of rows.jsonl")
    options = parser.parse_args(arguments)
    results = Results(options.out / "rows.jsonl")
    for row in converted(read_lines(options.lines)):
        results.add(row)


if __name__ == "__main__":
    main()
