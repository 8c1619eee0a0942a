"""The runner of releases: what it reads, what it calls a failure, what it says when it cannot
run.
"""

from __future__ import annotations

import sys
from xml.etree import ElementTree

import pytest

from hf_packfree.versions import VERSIONS
from tests.compat import measure, run, table
from tests.compat.measure import Outcome

ALL_FINE = {
    (*cell, attention): (5e-07, 2e-06) for cell in table.CELLS for attention in ("sdpa", "eager")
}


def test_the_selection_begins_and_ends_where_the_table_of_versions_does():
    assert set(run.SELECTED) <= set(run.EVERY)
    assert (
        (run.SELECTED[0], run.SELECTED[-1])
        == (run.EVERY[0], run.EVERY[-1])
        == VERSIONS["transformers"].cpu
    )


def test_a_row_holds_the_worst_of_both_runs():
    others = {("llama", "text", "sdpa"): (1e-07, 9e-06), ("lfm2", "text", "sdpa"): (4e-07, 2e-06)}
    other = Outcome({**ALL_FINE, ("qwen3_5", "media", "eager"): (7e-07, 1e-06), **others}, [])
    row = table.row_of("5.9.0", "0.12.3", [Outcome(ALL_FINE, []), other])
    cells = dict(zip(table.HEAD, row, strict=True))
    assert [cells.pop(name) for name in ("transformers", "`kernels`", "Qwen3.5, media")] == [
        "5.9.0",
        "0.12.3",
        "7e-07 / 2e-06",
    ]
    assert cells.pop(table.OTHERS) == "2 families, 4e-07 / 9e-06"
    assert cells.pop("made on") and len(cells) == 12 and set(cells.values()) == {"5e-07 / 2e-06"}


@pytest.mark.parametrize(
    "spoiled",
    [
        Outcome(
            ALL_FINE,
            ["test_one_row[qwen3_5_moe-seq_idx-sdpa]"],
            frozenset({("qwen3_5_moe", "text")}),
        ),
        Outcome(
            {
                key: found
                for key, found in ALL_FINE.items()
                if key != ("qwen3_5_moe", "text", "sdpa")
            },
            [],
        ),
    ],
)
def test_one_failure_or_a_missing_number_fails_that_cell_alone(spoiled):
    *cells, others = table.row_of("5.9.0", None, [Outcome(ALL_FINE, []), spoiled])[3:]
    assert others == table.NOT_RUN
    assert [cell for cell, text in zip(table.CELLS, cells) if text.startswith("fails")] == [
        ("qwen3_5_moe", "text")
    ]


def test_a_row_replaces_the_release_s_last_one_and_no_other(tmp_path, monkeypatch):
    full, short = tmp_path / "compat_full.md", tmp_path / "compatibility.md"
    for page in (full, short):
        page.write_text(f"before\n{table.MARK}\nnothing yet\n{table.MARK}\nafter\n")
    monkeypatch.setattr(table, "DOCS", tmp_path)
    fine = Outcome({**ALL_FINE, ("llama", "text", "sdpa"): (1e-07, 1e-06)}, [])
    for version, outcomes in (
        ("5.12.1", [fine]),
        ("5.9.0", [fine]),
        ("5.9.0", [fine, Outcome({}, ["nothing ran"])]),
    ):
        table.write(table.row_of(version, None, outcomes))
    text = full.read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| 5.")]
    failing = [(row[0], "fails" in " ".join(row)) for row in rows]
    assert failing == [
        *[("| 5.9.0", True), ("| 5.12.1", False)] * 2,
        ("| 5.9.0", False),
        ("| 5.12.1", False),
    ]
    assert text.startswith(f"before\n{table.MARK}\nWritten by") and text.endswith(
        f"{table.MARK}\nafter\n"
    )
    assert "transformers 5.9.0 to 5.12.1, 2 releases: not exact on 5.9.0" in short.read_text()
    table.write(table.row_of("5.9.0", None, [fine]))
    assert "2 releases: exact on every one, worst 5e-07 and 2e-06 (relative" in short.read_text()
    assert "not every family" not in short.read_text()
    row = table.row_of("5.9.0", None, [fine])
    table.write((*row[:-1], table.NOT_RUN))
    assert "gradients). On 1 of them not every family was run." in short.read_text()


def test_the_sentence_is_that_of_the_full_table():
    assert (table.DOCS / "compatibility.md").read_text().split(table.MARK)[
        1
    ].strip() == table.sentence(table.rows_held())


def test_reads_the_worst_number_and_the_failures():
    case = '<testcase name="{}"><properties>{}</properties>{}</testcase>'
    names = ("family", "documents", "attention", "logits", "gradients")
    facts = "".join(f'<property name="{name}" value="{{}}"/>' for name in names)
    failure = '<failure message="far off"/>'
    cases = [
        case.format("one", facts.format("qwen3_5", "text", "sdpa", "1e-07", "3e-06"), ""),
        case.format("two", facts.format("qwen3_5", "text", "sdpa", "2e-07", "1e-06"), failure),
        case.format("three[qwen2_5_vl-right]", "", failure),
    ]
    report = ElementTree.ElementTree(
        ElementTree.fromstring(f"<testsuite>{''.join(cases)}</testsuite>")
    )
    spoiled = {("qwen3_5", "text"), ("qwen2_5_vl", "text"), ("qwen2_5_vl", "media")}
    wanted = {("qwen3_5", "text", "sdpa"): (2e-07, 3e-06)}
    assert measure.read(report) == Outcome(
        wanted, ["two", "three[qwen2_5_vl-right]"], frozenset(spoiled)
    )
    nothing = ElementTree.ElementTree(ElementTree.fromstring("<testsuite/>"))
    assert measure.read(nothing) == Outcome({}, ["no exactness test ran"])


def test_an_environment_that_cannot_be_made_is_said_and_ends_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(sys, "argv", ["run", "5.99.0", "--envs", str(tmp_path)])
    assert run.main() == 2
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "with transformers==5.99.0; wanted one in which that can be imported; check the network"
        in said
    )
    assert "No matching distribution found" in said
