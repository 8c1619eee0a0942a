"""Every tensor of a saved head fills something in an inference engine, and nothing stays empty;
by names (see `engines`).
"""

from __future__ import annotations

import pytest

from tests.mtp.engines import HEADS, parameters, placed


@pytest.mark.parametrize(
    ("engine", "layout"), [(engine, layout) for engine, heads in HEADS.items() for layout in heads]
)
def test_an_engine_fills_its_head(engine, layout):
    parts = [placed(engine, name) for name in HEADS[engine][layout]]
    assert set().union(*parts) == parameters(engine, layout != "dense")
    assert sum(map(len, parts)) == len(set().union(*parts)), "nothing twice"
