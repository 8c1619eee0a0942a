"""Two trees are compared by ratios of what each turn measured, and every turn runs its own tree's package."""

from __future__ import annotations

import shutil

import pytest

from tests.benchmarks import compare
from tests.benchmarks.run_all import ROOT, source


def test_ratios_are_of_medians_and_of_best_steps():
    row = {"workload": "w", "variant": "v", "peak_gib": 1.0}
    rows = [
        row | {"tree": tree, "ms": ms, "ms_min": best}
        for tree, ms, best in (("before", 100, 90), ("after", 110, 81), ("before", 120, 95), ("after", 132, 100))
    ]
    assert compare.table(rows).splitlines()[1].split() == ["w", "v", "110.00", "121.00", "1.100", "0.900", "1.00", "1.00"]
    assert compare.table([*rows, row | {"tree": "after", "error": "OutOfMemoryError: 1"}]).endswith("OutOfMemoryError: 1")
    assert compare.table(rows[:1]).endswith("no result")


@pytest.mark.slow
def test_every_turn_imports_its_own_tree(tmp_path, capfd):
    shutil.copytree(ROOT / "hf_packfree", tmp_path / "hf_packfree", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "hf_packfree/errors.py").open("a") as file:
        file.write("# another tree\n")
    out = tmp_path / "out"
    compare.main(["--before", str(tmp_path), "--out", str(out), "--rounds=1", "--only=9b", "--device=cpu", "--tiny"])
    heads = [line for line in capfd.readouterr().out.splitlines() if line.startswith(compare.TREES)]
    assert [line.split()[-1] for line in heads] == [source(tmp_path), source(ROOT)]
    assert [row["tree"] for row in compare.read_lines(out / "compare.jsonl")[1:]] == ["before", "after"]
