"""What two runs of the same tests say, test by test, and the table of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from rich.table import Table

REFUSED = "test_custom_4d_attention_mask"
"""Its mask makes a tree of continuations that share a prefix, which a recurrent state cannot
honour: refused by name.
"""


@dataclass(frozen=True)
class Outcome:
    """What a test did: "passed", "skipped" or "failed", and the message of the latter two."""

    verdict: str
    message: str = ""


Outcomes = dict[str, Outcome]
"""By class and name."""


def read(report: Path) -> Outcomes:
    """Return the outcomes that pytest's report holds; of a test's subtests, the worst stands for
    it.
    """
    found: Outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{str(case.get('classname')).rpartition('.')[2]}::{case.get('name')}"
        found[name] = max(
            found.get(name, Outcome("passed")),
            _outcome(case),
            key=lambda outcome: _RANK[outcome.verdict],
        )
    return found


_RANK = {"passed": 0, "skipped": 1, "failed": 2}


def _outcome(case: ElementTree.Element) -> Outcome:
    for kind, verdict in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(kind)
        if found is not None:
            return Outcome(verdict, str(found.get("message")))
    return Outcome("passed")


def lost(unpatched: Outcomes, patched: Outcomes) -> dict[str, str]:
    """Return {test: what it does patched} of the tests that pass unpatched and do not pass patched.

    A skip is a loss, and so is a test that is not there; the named refusal is none.
    """
    missing = Outcome("missing")
    return {
        name: f"{found.verdict}: {found.message}".rstrip(": ")
        for name, wanted in unpatched.items()
        if wanted.verdict == "passed"
        and not name.endswith(f"::{REFUSED}")
        and (found := patched.get(name, missing)).verdict != "passed"
    }


def table_of(title: str, unpatched: Outcomes, patched: Outcomes) -> Table:
    """Return how many tests of each class pass, fail and are skipped in both runs, are refused
    by name, and are lost.
    """
    columns = (
        "pass in both",
        "fail in both",
        "skipped unpatched",
        "refused by name",
        "pass unpatched only",
    )
    table = Table("models", *columns, title=title)
    gone = lost(unpatched, patched)
    counts: dict[str, Counter[str]] = {}
    for name, wanted in sorted(unpatched.items()):
        counts.setdefault(name.partition("::")[0], Counter())[
            _column(name, wanted, patched, gone)
        ] += 1
    for models, of in counts.items():
        table.add_row(models, *(str(of[column]) for column in columns))
    return table


def _column(name: str, wanted: Outcome, patched: Outcomes, gone: dict[str, str]) -> str:
    if name in gone:
        return "pass unpatched only"
    if wanted.verdict == "passed":
        return (
            "pass in both"
            if name in patched and patched[name].verdict == "passed"
            else "refused by name"
        )
    return "skipped unpatched" if wanted.verdict == "skipped" else "fail in both"
