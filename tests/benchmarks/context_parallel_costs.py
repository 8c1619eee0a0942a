"""Write the constants by which context parallelism chooses how layers exchange, from committed
results.

    python -m tests.benchmarks.context_parallel_costs            # compare: exit status 1 where they differ
    python -m tests.benchmarks.context_parallel_costs --write    # into hf_packfree/parallel/measured.py
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_packfree.parallel import costs
from tests.benchmarks import report
from tests.benchmarks.shapes import SHAPES, fixed_lengths
from tests.benchmarks.timing import name_of, read_lines

TARGET = report.ROOT / "hf_packfree/parallel/measured.py"
ROW = "2b-64k-cp2", "8k documents, {way}, predicted"
"""Of which one GPU ran each rank's own work in both ways."""


def constants(ranks: Path, layers: Path) -> dict[str, float]:
    """Return them by name.

    Args:
        ranks: a file of `context_parallel.py`, measured on several GPUs.
        layers: a result of `run_all.py`.
    """
    lines = read_lines(ranks)
    exchanges = [line for line in lines if line["workload"] == "exchanges"][-1]
    rows = {name_of(line): line for line in lines}
    own = {way: rows[ROW[0], ROW[1].format(way=way)] for way in ("heads", "state")}
    received = gdn_layers() * costs.bytes_by_heads(
        gdn_sizes(), world=2, tokens=own["heads"]["tokens"] // 2
    )
    # the same tokens in one document and in several, on one GPU: what they differ in is attention
    one, several = (rows["2b-64k-cp1", name] for name in ("one document", "8k documents"))
    pairs = (one["tokens"] ** 2 - sum(n**2 for n in fixed_lengths(one["tokens"], 8000))) / 2
    channels = SHAPES["2b"].sizes["num_attention_heads"] * SHAPES["2b"].sizes["head_dim"]
    rule = {name_of(row): row for row in json.loads(layers.read_text())["rows"]}
    return {
        "BYTES_PER_S": exchanges["rate"],
        "EXCHANGE_S": exchanges["latency_s"],
        "ATTENTION_S_PER_PAIR_AND_CHANNEL": (one["ms"] - several["ms"])
        / 1e3
        / (SHAPES["2b"].layers // 4)
        / pairs
        / channels,
        "COPY_S_PER_BYTE": (own["heads"]["own_ms"] - own["state"]["own_ms"]) / 1e3 / received,
        # of 32,768 tokens, by the slower backend
        "RULE_S_PER_TOKEN_AND_HEAD": rule["layer delta rule 16/16", "fla"]["ms"] / 1e3 / 2**15 / 16,
    }


def gdn_sizes() -> dict[str, int]:
    """Return heads and their sizes of the 2B shape."""
    sizes: dict[str, Any] = SHAPES["2b"].sizes
    return {
        "key_heads": sizes["linear_num_key_heads"],
        "value_heads": sizes["linear_num_value_heads"],
        "key_size": sizes["linear_key_head_dim"],
        "value_size": sizes["linear_value_head_dim"],
    }


def gdn_layers() -> int:
    """Return how many layers of the 2B shape are Gated DeltaNet: three of four."""
    return SHAPES["2b"].layers * 3 // 4


def text(ranks: Path, layers: Path) -> str:
    """Return the module that holds them."""
    found = "\n".join(
        f"{name} = {value:.4g}".replace("e+", "e")
        for name, value in constants(ranks, layers).items()
    )
    return (
        '"""What `costs` counts with, in seconds and bytes.\n\n'
        "Written by `python -m tests.benchmarks.context_parallel_costs --write` from\n"
        f"tests/benchmarks/results/{ranks.relative_to(report.RESULTS)} and\n"
        f"tests/benchmarks/results/{layers.relative_to(report.RESULTS)}.\n"
        '"""\n\n'
        f"{found}\n"
    )


def newest_of_ranks() -> Path:
    """Return the newest result that has what `constants` reads."""
    results = (report.RESULTS / "parallel").glob("*-x2-context-parallel.jsonl")
    needed = {(ROW[0], ROW[1].format(way=way)) for way in ("heads", "state")}
    return max(path for path in results if needed <= set(map(name_of, read_lines(path))))


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    wanted = text(newest_of_ranks(), report.newest(report.RESULTS))
    if options.write:
        TARGET.write_text(wanted)
    elif TARGET.read_text() != wanted:
        sys.exit(f"found {TARGET} other than the results say; wanted this:\n{wanted}")


if __name__ == "__main__":
    main()
