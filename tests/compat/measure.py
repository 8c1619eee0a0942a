"""One run of the tests marked `compat` in one environment, and what it measured."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.compat.environments import FAKES

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
Errors = tuple[float, float]
"""Worst relative RMS of logits, of a parameter's gradient."""
DOCUMENTS = ("text", "media")
"""What documents hold."""


@dataclass(frozen=True)
class Outcome:
    """What one run found.

    Attributes:
        errors: {(family, documents, attention): the worst of all input formats}.
        failed: names of tests that failed, or why none ran.
        spoiled: the family, and the documents as far as the test says, of each that failed.
    """

    errors: dict[tuple[str, str, str], Errors]
    failed: list[str]
    spoiled: frozenset[tuple[str, str]] = frozenset()


def measure(python: Path, fakes: bool) -> Outcome:
    """Run the tests in one process of one thread; with `fakes`, those that kernel packages
    concern, with such packages.
    """
    path = os.pathsep.join(map(str, [ROOT, FAKES] if fakes else [ROOT]))
    settings = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        chosen = "compat and not compat(kernels=False)" if fakes else "compat"
        options = [
            "-q",
            "-m",
            chosen,
            f"--junitxml={report}",
            "-o",
            "junit_family=xunit1",
            "-p",
            "no:cacheprovider",
        ]
        files = [
            str(file)
            for file in sorted(TESTS.rglob("test_*.py"))
            if "mark.compat" in file.read_text()
        ]
        command = [str(python), "-m", "pytest", *options, *files]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=settings)
        if not report.exists():
            return Outcome({}, [f"pytest wrote no report: {(done.stdout + done.stderr)[-2000:]}"])
        return read(ElementTree.parse(report))


def read(report: ElementTree.ElementTree) -> Outcome:
    """Return what pytest's report says of the run."""
    numbers: dict[tuple[str, str, str], list[Errors]] = defaultdict(list)
    failed, spoiled = [], set()
    for case in report.iter("testcase"):
        facts = {str(entry.get("name")): str(entry.get("value")) for entry in case.iter("property")}
        name = str(case.get("name"))
        if "logits" in facts:
            key = facts["family"], facts["documents"], facts["attention"]
            numbers[key].append((float(facts["logits"]), float(facts["gradients"])))
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
            # a test's first parameter
            family = facts.get("family") or re.sub(r".*?\[(\w+).*", r"\1", name)
            spoiled |= {
                (family, documents)
                for documents in ([facts["documents"]] if "documents" in facts else DOCUMENTS)
            }
    errors = {key: tuple(max(column) for column in zip(*found)) for key, found in numbers.items()}
    return Outcome(
        errors, failed if numbers else [*failed, "no exactness test ran"], frozenset(spoiled)
    )
