"""Two trees are compared by ratios of what their turns measured, and every turn runs its own
tree's package.
"""

from __future__ import annotations

import json
import shutil

import pytest

from tests.benchmarks import compare
from tests.benchmarks.run_all import ROOT, source
from tests.benchmarks.timing import read_lines


def test_ratios_are_of_rounds_and_of_best_steps():
    before, after = (
        [{"ms": ms, "ms_min": best, "peak_gib": 1.0} for ms, best in turns]
        for turns in (((100, 90), (200, 95), (300, 99)), ((150, 81), (200, 100), (330, 110)))
    )
    assert compare.line_of("w v", [before, after]).split() == [
        "w",
        "v",
        "200.00",
        "200.00",
        "1.100",
        "0.900",
        "1.00",
        "1.00",
    ]
    failed = [*after, {"error": "OutOfMemoryError: 1"}]
    assert compare.line_of("w v", [before, failed]).endswith("OutOfMemoryError: 1")


@pytest.mark.slow
def test_every_turn_imports_its_own_tree(tmp_path, capfd):
    shutil.copytree(
        ROOT / "hf_packfree", tmp_path / "hf_packfree", ignore=shutil.ignore_patterns("__pycache__")
    )
    with (tmp_path / "hf_packfree/errors.py").open("a") as file:
        file.write("# another tree\n")
    out = tmp_path / "out"
    compare.main(
        [
            "--before",
            str(tmp_path),
            "--out",
            str(out),
            "--rounds=2",
            "--only=9b|moe-4k",
            "--device=cpu",
            "--tiny",
        ]
    )
    heads = [line for line in capfd.readouterr().err.splitlines() if line.startswith(compare.TREES)]
    assert sorted(line.split()[-1] for line in heads) == sorted([source(tmp_path), source(ROOT)])
    rows = read_lines(out / "compare.jsonl")[1:]
    assert [row["tree"] for row in rows] == ["before", "after"] * 4
    assert [row["workload"] for row in rows] == ["9b-4k-packed"] * 4 + ["moe-4k-packed"] * 4
    assert all(row["ms"] > 0 for row in rows), json.dumps(rows)
