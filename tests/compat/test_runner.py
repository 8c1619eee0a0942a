"""The runner of releases: what it reads, what it calls a failure, what it says when it cannot run."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

import pytest

from hf_packfree.versions import VERSIONS
from tests.compat import measure, run, table
from tests.compat.measure import Outcome

ALL_FINE = {cell: (5e-07, 2e-06) for cell in table.CELLS}


def test_the_selection_begins_and_ends_where_the_table_of_versions_does():
    assert set(run.SELECTED) <= set(run.EVERY)
    assert (run.SELECTED[0], run.SELECTED[-1]) == (run.EVERY[0], run.EVERY[-1]) == VERSIONS["transformers"].cpu


def test_a_row_holds_the_worst_of_both_runs():
    other = Outcome({**ALL_FINE, ("qwen3_5", "eager"): (7e-07, 1e-06)}, [])
    row = table.row_of("5.9.0", "0.12.3", [Outcome(ALL_FINE, []), other])
    assert row[:1] + row[2:] == ("5.9.0", "0.12.3", "exact 5e-07 / 2e-06", "exact 7e-07 / 2e-06", *["exact 5e-07 / 2e-06"] * 4)


@pytest.mark.parametrize("spoiled", [
    Outcome(ALL_FINE, ["test_one_row[qwen3_5_moe-seq_idx-sdpa]"]),
    Outcome({cell: found for cell, found in ALL_FINE.items() if cell != ("qwen3_5_moe", "sdpa")}, []),
])
def test_one_failure_or_a_missing_number_fails_that_cell_alone(spoiled):
    cells = table.row_of("5.9.0", None, [Outcome(ALL_FINE, []), spoiled])[3:]
    verdicts = {cell: text.split()[0] for cell, text in zip(table.CELLS, cells)}
    assert [cell for cell, verdict in verdicts.items() if verdict == "fails"] == [("qwen3_5_moe", "sdpa")]


def test_a_row_replaces_the_release_s_last_one_and_no_other(tmp_path, monkeypatch):
    full, short = tmp_path / "compat_full.md", tmp_path / "compatibility.md"
    for page in (full, short):
        page.write_text(f"before\n{table.MARK}\nnothing yet\n{table.MARK}\nafter\n")
    monkeypatch.setattr(table, "DOCS", tmp_path)
    fine = Outcome(ALL_FINE, [])
    for version, outcomes in (("5.12.1", [fine]), ("5.9.0", [fine]), ("5.9.0", [fine, Outcome({}, ["nothing ran"])])):
        table.write(table.row_of(version, None, outcomes))
    text = full.read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| 5.")]
    assert [(row[0], row[3].split()[0]) for row in rows] == [("| 5.9.0", "fails"), ("| 5.12.1", "exact")]
    assert text.startswith(f"before\n{table.MARK}\nWritten by") and text.endswith(f"{table.MARK}\nafter\n")
    assert "transformers 5.9.0 to 5.12.1, 2 releases: not exact on 5.9.0" in short.read_text()
    table.write(table.row_of("5.9.0", None, [fine]))
    assert "2 releases: exact on every one, worst 5e-07 and 2e-06 (relative" in short.read_text()


def test_the_sentence_is_that_of_the_full_table():
    assert (table.DOCS / "compatibility.md").read_text().split(table.MARK)[1].strip() == table.sentence(table.rows_held())


def test_reads_the_worst_number_and_the_failures():
    case = '<testcase name="{}"><properties>{}</properties>{}</testcase>'
    facts = "".join(f'<property name="{name}" value="{{}}"/>' for name in ("family", "attention", "logits", "gradients"))
    cases = [
        case.format("one", facts.format("qwen3_5", "sdpa", "1e-07", "3e-06"), ""),
        case.format("two", facts.format("qwen3_5", "sdpa", "2e-07", "1e-06"), '<failure message="far off"/>'),
    ]
    report = ElementTree.ElementTree(ElementTree.fromstring(f"<testsuite>{''.join(cases)}</testsuite>"))
    assert measure.read(report) == Outcome({("qwen3_5", "sdpa"): (2e-07, 3e-06)}, ["two"])
    nothing = ElementTree.ElementTree(ElementTree.fromstring("<testsuite/>"))
    assert measure.read(nothing) == Outcome({}, ["no exactness test ran"])


def test_an_environment_that_cannot_be_made_is_said_and_ends_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(sys, "argv", ["run", "5.99.0", "--envs", str(tmp_path)])
    assert run.main() == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "with transformers==5.99.0; wanted one in which that can be imported; check the network" in said
    assert "No matching distribution found" in said
