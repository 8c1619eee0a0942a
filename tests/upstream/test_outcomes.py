"""The comparison of two runs: what counts as lost, what is counted, and what it says when the
tests cannot be had.
"""

from __future__ import annotations

import sys

import pytest

from hf_packfree.versions import VERSIONS
from tests.upstream import run, sources
from tests.upstream.outcomes import REFUSED, Outcome, lost, read, table_of

PASSED, SKIPPED, FAILED = Outcome("passed"), Outcome("skipped", "why"), Outcome("failed", "because")


@pytest.mark.parametrize(
    ("wanted", "found", "says"),
    [
        (PASSED, PASSED, None),
        (PASSED, FAILED, "failed: because"),
        (PASSED, SKIPPED, "skipped: why"),
        (PASSED, None, "missing"),
        (FAILED, FAILED, None),
        (FAILED, SKIPPED, None),
        (SKIPPED, FAILED, None),
    ],
)
def test_what_passes_unpatched_has_to_pass_patched(wanted, found, says):
    patched = {"Models::test_it": found} if found else {}
    assert lost({"Models::test_it": wanted}, patched) == ({"Models::test_it": says} if says else {})


def test_one_test_alone_is_refused_by_name():
    names = (f"Models::{REFUSED}", f"Models::{REFUSED}_too", "Models::test_generate")
    gone = lost(dict.fromkeys(names, PASSED), dict.fromkeys(names, FAILED))
    assert list(gone) == [f"Models::{REFUSED}_too", "Models::test_generate"]


def test_every_test_is_counted_once():
    unpatched = {
        "A::one": PASSED,
        "A::two": PASSED,
        "A::three": SKIPPED,
        "B::one": FAILED,
        f"B::{REFUSED}": PASSED,
    }
    patched = {
        "A::one": PASSED,
        "A::two": FAILED,
        "A::three": SKIPPED,
        "B::one": PASSED,
        f"B::{REFUSED}": FAILED,
    }
    table = table_of("title", unpatched, patched)
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert rows == [("A", "1", "0", "1", "0", "1"), ("B", "0", "1", "0", "1", "0")]


def test_a_test_is_what_the_worst_of_its_subtests_is(tmp_path):
    case = '<testcase classname="tests.models.Models" name="{}">{}</testcase>'
    cases = [
        case.format("one", ""),
        case.format("one", '<failure message="off"/>'),
        case.format("one", ""),
        case.format("two", '<skipped message="no GPU"/>'),
        case.format("three", '<error message="setup"/>'),
    ]
    (tmp_path / "report.xml").write_text(
        f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"
    )
    assert read(tmp_path / "report.xml") == {
        "Models::one": Outcome("failed", "off"),
        "Models::two": Outcome("skipped", "no GPU"),
        "Models::three": Outcome("failed", "setup"),
    }


def test_tests_that_cannot_be_had_are_said_and_end_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    # found, so that the tests are looked for
    monkeypatch.setattr(run, "environments", lambda version, folder: sources)
    monkeypatch.setattr(sources, "bare", sys.executable, raising=False)
    monkeypatch.setattr(sys, "argv", ["run", "5.99.0", "--cache", str(tmp_path)])
    assert run.main() == 2
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "found no way to fetch the source distribution of transformers 5.99.0; wanted it for its "
        "tests" in said
    )


@pytest.mark.parametrize(
    ("holds", "says"),
    [("5.16.0.dev0", None), ("5.17.0", "found transformers 5.17.0"), (None, "nowhere")],
)
def test_a_checkout_of_another_release_is_refused(tmp_path, holds, says):
    source = tmp_path / "src" / "transformers"
    source.mkdir(parents=True)
    if holds:
        (source / "__init__.py").write_text(f'__version__ = "{holds}"\n')
    if says is None:
        assert sources.check_checkout(tmp_path, "5.16.1") == tmp_path
        return
    with pytest.raises(sources.CannotFetch, match=says):
        sources.check_checkout(tmp_path, "5.16.1")


@pytest.mark.slow
def test_a_run_in_which_nothing_passes_is_no_proof(tmp_path):
    (tmp_path / "tests").mkdir()
    with pytest.raises(sources.CannotFetch, match="found no test of .* that passes patched"):
        run.run(sys.executable, tmp_path, True, False)


def test_both_ends_of_the_supported_releases_are_run():
    assert VERSIONS["transformers"].cpu == ("5.2.0", "5.24.0")
