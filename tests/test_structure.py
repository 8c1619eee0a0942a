"""The house: imports point down, importing changes nothing, files stay small, public names have docstrings."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import hf_packfree

HOUSE = Path(hf_packfree.__file__).parent
FLOORS = [
    {"errors", "_version"},
    {"packing"},
    {"ops"},
    {"models"},
    {"patching"},
    {"verify"},
    {"trainer", "doctor"},
    {"demo"},
    {"bench"},
    {"cli"},
    {"__main__", "__init__"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
MAY_IMPORT_TRANSFORMERS = {"models", "patching", "trainer", "doctor", "demo", "bench"}


def imports():
    for file in sorted(HOUSE.rglob("*.py")):
        room = file.relative_to(HOUSE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield file, room, node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file.name}:{node.lineno} imports relatively"
                yield file, room, node.lineno, node.module


def test_imports_point_down():
    for file, room, line, module in imports():
        if module.startswith("hf_packfree."):
            used = module.split(".")[1]
            assert used == room or FLOOR_OF[used] < FLOOR_OF[room], f"{file.name}:{line} reaches up or across to {used}"


def test_transformers_stays_in_its_rooms():
    for file, room, line, module in imports():
        if module.split(".")[0] == "transformers":
            assert room in MAY_IMPORT_TRANSFORMERS, f"{file.name}:{line} imports transformers"


def test_importing_needs_no_transformers_and_changes_nothing():
    code = (
        "import sys, torch, hashlib, os; before = set(sys.modules), dict(os.environ)\n"
        "import hf_packfree\n"
        "added = {name.split('.')[0] for name in set(sys.modules) - before[0]}\n"
        "assert not added & {'transformers', 'accelerate', 'rich', 'matplotlib', 'fla', 'triton'}, added\n"
        "assert dict(os.environ) == before[1]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_record_comes_without_the_compiler():
    """Who collates in worker processes imports it in each, and torch's compiler is large."""
    code = (
        "import sys; from hf_packfree import PackedSequence; PackedSequence.from_lengths([3])\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_stay_small():
    for file in HOUSE.rglob("*.py"):
        assert len(file.read_text().splitlines()) <= 260, f"{file.relative_to(HOUSE)} wants splitting"


def test_public_names_are_documented():
    for name in hf_packfree.__all__:
        thing = getattr(hf_packfree, name)
        if callable(thing):
            assert inspect.getdoc(thing), f"{name} has no docstring"
            signature = inspect.signature(thing)
            given = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
            for parameter in given if not inspect.isclass(thing) or name == "PackFreeCallback" else []:
                assert f"{parameter.name}" in inspect.getdoc(thing), f"{name} does not explain {parameter.name}"
