"""What README says was measured on a GPU is what the newest committed result says."""

from __future__ import annotations

import json

from tests.gpu import report


def test_the_readme_holds_the_tables_of_the_newest_result():
    """If not: python -m tests.gpu.report --readme."""
    readme, path = report.ROOT / "README.md", report.newest(report.RESULTS)
    text = report.report(json.loads(path.read_text()), path.name)
    assert f"tests/gpu/results/{path.name}" in text
    assert readme.read_text() == report.filled(readme, text, report.PLOT)
