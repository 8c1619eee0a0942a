"""The table of other libraries in docs/compatibility.md says what the tests say, and the
generator reads their results.
"""

from __future__ import annotations

import pytest

from tests.integrations.conftest import ROWS
from tests.integrations.run import LIBRARIES, MARK, PAGE, read

REPORT = """<testsuites><testsuite>
<testcase name="one"><properties>{row}<property name="error" value="2e-6"/><property name="control" value="0.5"/></properties>
</testcase>
<testcase name="two"><properties>{row}<property name="error" value="3e-6"/></properties></testcase>
<testcase name="three"><properties>{row}</properties><skipped message="x not installed"/></testcase>
<testcase name="four"><properties>{other}</properties><skipped message="y not installed"/></testcase>
<testcase name="five"><properties>{third}</properties><failure/></testcase>
<testcase name="unmarked"/>
</testsuite></testsuites>"""


def properties(library, what, says="works"):
    facts = {"library": library, "what": what, "says": says}
    return "".join(f'<property name="{name}" value="{value}"/>' for name, value in facts.items())


def test_rows_come_from_results(tmp_path):
    row, other, third = properties("PEFT", "a"), properties("Trainer", "b"), properties("PEFT", "c")
    (tmp_path / "report.xml").write_text(REPORT.format(row=row, other=other, third=third))
    assert [line.cells() for line in read(tmp_path / "report.xml")] == [
        ("Trainer", "b", "not run here: y not installed", "", ""),
        ("PEFT", "a", "works", "3e-06", "5e-01"),
        ("PEFT", "c", "**fails**: five", "", ""),
    ]


def test_the_page_says_what_the_tests_say(request):
    table = PAGE.read_text().split(MARK)[1]
    written = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))[:3]
        for line in table.splitlines()[4:]
    ]
    marks = request.config.stash[ROWS]
    rows = {(m.kwargs["library"], m.kwargs["what"]): m.kwargs["says"] for m in marks}
    if not rows:
        pytest.skip("no test of this room is selected")
    assert {library for library, _ in rows} <= set(LIBRARIES)
    for (library, what), says in rows.items():
        found = [verdict for *name, verdict in written if name == [library, what]]
        assert len(found) == 1 and (found[0] == says or found[0].startswith("not run here")), (
            library,
            what,
        )
