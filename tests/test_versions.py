"""One table of releases: setup.cfg says the same, messages name its floors, and no other file
has a number of its own.
"""

from __future__ import annotations

import ast
from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import hf_packfree
from hf_packfree.versions import VERSIONS
from tests.source import nodes

HOUSE = Path(hf_packfree.__file__).parent
SETUP = ConfigParser()
SETUP.read(HOUSE.parent / "setup.cfg")
OWN = {"matplotlib"}
"""What setup.cfg requires and no code of ours looks at the version of."""


def required() -> dict[str, str]:
    """{package: floor} of what a user installs: the requirements and the extras that are not for
    developing.
    """
    lines = SETUP["options"]["install_requires"].split("\n")
    lines += [
        line
        for extra in ("gpu", "demo")
        for line in SETUP["options.extras_require"][extra].split("\n")
    ]
    floors = {}
    for requirement in map(Requirement, filter(None, lines)):
        (bound,) = requirement.specifier
        assert bound.operator == ">="
        floors[requirement.name] = bound.version
    return floors


def test_setup_asks_for_the_floors_of_the_table():
    for name, floor in required().items():
        assert name in OWN or VERSIONS[name].floor == floor, name
    assert SETUP["options"]["python_requires"] == f">={VERSIONS['python'].floor}"


def test_every_floor_of_the_table_is_required():
    """But of what is built on the spot, and of what torch brings: no extra of a user's installs
    them.
    """
    floors = {name for name, row in VERSIONS.items() if row.floor is not None}
    assert floors - set(required()) - {"python"} == {"causal-conv1d", "mamba-ssm", "triton"}


def test_the_tests_bring_triton_on_linux_alone():
    lines = SETUP["options.extras_require"]["test"].split("\n")
    assert f"{VERSIONS['triton'].requirement}; sys_platform == 'linux'" in lines


def test_classifiers_name_the_pythons_of_the_table():
    words = "Programming Language :: Python :: 3."
    lines = SETUP["metadata"]["classifiers"].split("\n")
    found = [Version(line.rpartition(" ")[2]) for line in lines if line.startswith(words)]
    oldest, newest = map(Version, VERSIONS["python"].cpu)
    assert [(version.major, version.minor) for version in found] == [
        (3, n) for n in range(oldest.minor, newest.minor + 1)
    ]


@pytest.mark.parametrize("row", VERSIONS.values(), ids=VERSIONS)
def test_what_was_tested_is_not_below_the_floor(row):
    tested = [Version(release) for release in (*row.cpu, *row.gpu)]
    assert (
        tested
        and list(map(Version, row.cpu)) == sorted(map(Version, row.cpu))
        and len(row.cpu) in (0, 2)
    )
    assert row.floor is None or min(tested) >= Version(row.floor)
    assert row.batch_invariant is None or any(
        release.startswith(row.batch_invariant) for release in row.gpu
    )


def test_no_other_file_compares_with_a_number_of_its_own():
    """Where transformers' releases differ is named beside what differs."""
    found = []
    for file in sorted(HOUSE.rglob("*.py")):
        every = nodes(file.read_text())
        calls = (
            node
            for node in every
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Version"
        )
        literal = [
            call
            for call in calls
            if isinstance(call.args[0], ast.Constant) and call.args[0].value != "0"
        ]
        found += [file.relative_to(HOUSE).as_posix() for _ in literal[:1]]
        words = (
            node.value
            for node in every
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
        assert not [
            text
            for text in words
            if "pip install" in text and ">=" in text and any(c.isdigit() for c in text)
        ], file
    assert found == ["models/compat.py"]
