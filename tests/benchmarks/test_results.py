"""The committed results have the form that a reader needs, and the pages hold what the report
module prints from them.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.benchmarks import (
    context_parallel_costs,
    context_parallel_report,
    report,
)
from tests.benchmarks.timing import read_lines

NEWEST = report.newest(report.RESULTS)
ABLATED = report.ablations()
RESULTS = sorted(report.RESULTS.rglob("*.json"))


def test_the_pages_hold_the_tables_of_the_newest_results():
    """If not: python -m tests.benchmarks.report --write."""
    found = report.every_table(NEWEST, ABLATED)
    for (page, mark), text in found.items():
        held = (report.ROOT / page).read_text()
        assert held == report.put_in(held, mark, text), page


def test_the_page_of_context_parallelism_holds_every_measured_row():
    """If not: python -m tests.benchmarks.context_parallel_report --write."""
    held = (report.ROOT / context_parallel_report.PAGE).read_text()
    found = context_parallel_report.every()
    assert found[context_parallel_report.MARK].count("efficiency") >= 13
    for mark, text in found.items():
        assert held == report.put_in(held, mark, text), mark


@pytest.mark.parametrize(
    "path", RESULTS, ids=lambda path: path.relative_to(report.RESULTS).as_posix()
)
def test_a_result_says_when_and_on_what_it_was_made(path):
    result = json.loads(path.read_text())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-nvidia-\w+(-[\w-]+)?", path.stem)
    assert {"torch", "transformers"} <= result["versions"].keys()
    assert result.get("machine", result.get("device")).startswith("NVIDIA ")


def test_the_full_result_says_what_made_it():
    result = json.loads(NEWEST.read_text())
    assert NEWEST.stem.startswith(result["date"]) and re.fullmatch(
        r"[0-9a-f]{12}", result["source"]
    )
    assert result["versions"]["hf_packfree"]
    # of each row: when, on what, with what, of which commit
    for run in {row["run"] for row in result["rows"]}:
        made = result["runs"][str(run)]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", made["date"]) and made["machine"], run
        assert made["versions"]["torch"] and re.match(r"[0-9a-f]{7}\b", made["commit"]), run
    names = [(row["workload"], row["variant"]) for row in result["rows"]]
    assert len(names) == len(set(names))
    assert all(
        {"ms", "real_tokens_per_s"} <= row.keys() or "error" in row for row in result["rows"]
    )


@pytest.mark.parametrize("path", ABLATED, ids=lambda path: path.name)
def test_an_ablation_says_what_made_it(path):
    about, *rows = read_lines(path)
    assert path.name.startswith(about["date"]) and re.fullmatch(r"[0-9a-f]{12}", about["source"])
    assert about["script"] == "tests.benchmarks.ablation" and about["machine"].startswith("NVIDIA ")
    assert {(row["workload"], "nothing") for row in rows} <= {
        (row["workload"], row["off"]) for row in rows
    }


def test_the_package_counts_with_what_was_measured():
    """It exits where the constants of context parallelism are not those of the results."""
    context_parallel_costs.main([])
