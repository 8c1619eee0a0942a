"""A test may be proof of a row of the table in docs/compatibility.md: its mark and its numbers
go into pytest's report.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.compare import worst
from tests.support import CONTROL, GRADIENT_TOL

QUICK = ("test_liger", "test_loading", "test_peft")
"""Files of a second or two; in the others a Trainer trains, a compiler compiles, or processes
start.
"""


ROWS = pytest.StashKey()
"""The marks of all tests that were collected, those that an expression leaves out, too."""


def pytest_collection_modifyitems(config, items):
    """Put the row into the test's properties, which a skipped test keeps too; all but this
    room's quick files are slow here.
    """
    config.stash[ROWS] = []
    for item in items:
        mark = item.get_closest_marker("integration")
        if mark is not None:
            config.stash[ROWS].append(mark)
            if item.path.parent == Path(__file__).parent and item.path.stem not in QUICK:
                item.add_marker(pytest.mark.slow)
            item.user_properties += [
                (name, mark.kwargs[name]) for name in ("library", "what", "says")
            ]


@pytest.fixture
def same_gradients(record_property):
    """Return the check of this room: gradients of every step as per document, and a control that
    is far off.
    """

    def check(found, wanted, control=None) -> None:
        if control is not None:
            leak = worst(control, wanted)
            record_property("control", leak)
            assert leak >= CONTROL * GRADIENT_TOL, (
                f"the control is off by {leak:.1e} only: this test sees no leak"
            )
        error = worst(found, wanted)
        record_property("error", error)
        assert error <= GRADIENT_TOL

    return check
