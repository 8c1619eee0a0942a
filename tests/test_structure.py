"""The house: imports point down, importing changes nothing, files and functions stay small, public
names have docstrings.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import hf_packfree
from hf_packfree import errors
from tests.source import nodes

HOUSE = Path(hf_packfree.__file__).parent
FLOORS = [
    {"errors", "versions", "_version", "refused_families"},
    {"once_differentiable"},
    {"packing"},
    {"parallel"},
    {"ops"},
    {"graphs"},
    {"models"},
    {"mtp"},
    {"patching"},
    {"verify"},
    {"trainer", "data", "doctor", "bench"},
    {"demo"},
    {"cli"},
    {"__main__", "__init__"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
MAY_IMPORT_TRANSFORMERS = {
    "models",
    "mtp",
    "patching",
    "verify",
    "trainer",
    "doctor",
    "bench",
    "demo",
    "cli",
}


def files():
    """Every file of the house with the room it is in."""
    return [
        (file, file.relative_to(HOUSE).parts[0].removesuffix(".py"))
        for file in sorted(HOUSE.rglob("*.py"))
    ]


def imports(source: str):
    """Yield line and dotted name of every import; a name taken from the package itself is dotted
    too.
    """
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = (
                [f"{module}.{alias.name}" for alias in node.names]
                if module == "hf_packfree"
                else [module]
            )
            yield from ((node.lineno, name) for name in names)


def reaches(source: str, room: str) -> list[str]:
    """Return a sentence per import that is relative, or that reaches a room beside or above this
    one.
    """
    found = []
    for line, name in imports(source):
        package, _, rest = name.partition(".")
        used = rest.partition(".")[0]
        # public names live at the top
        used = used if used in FLOOR_OF else "__init__"
        if not package:
            found.append(f"line {line} imports relatively")
        elif package == "hf_packfree" and used != room and FLOOR_OF[used] >= FLOOR_OF[room]:
            found.append(f"line {line} reaches up or across to {used}")
    return found


def test_imports_point_down():
    assert {
        str(file): found for file, room in files() if (found := reaches(file.read_text(), room))
    } == {}


@pytest.mark.parametrize(
    ("planted", "room", "used"),
    [
        ("from hf_packfree.models.trunk import PackedTrunk", "ops", "models"),
        ("from hf_packfree import apply_patches", "demo", "__init__"),
        ("from hf_packfree import cli, errors", "verify", "cli"),
        ("def later():\n    import hf_packfree", "doctor", "__init__"),
        ("import torch, hf_packfree.bench as bench", "trainer", "bench"),
        ("import hf_packfree.demo.run", "bench", "demo"),
    ],
)
def test_an_import_that_points_up_is_found(planted, room, used):
    (found,) = reaches(planted, room)
    assert found.endswith(f"reaches up or across to {used}")
    assert reaches(planted, "__main__" if used == "cli" else "__init__") == []


def test_a_relative_import_is_found():
    assert reaches("from . import inputs\nfrom ..errors import PackFreeError", "packing") == [
        "line 1 imports relatively",
        "line 2 imports relatively",
    ]


def test_transformers_stays_in_its_rooms():
    for file, room in files():
        for line, name in imports(file.read_text()):
            if name.split(".")[0] == "transformers":
                assert room in MAY_IMPORT_TRANSFORMERS, f"{file.name}:{line} imports transformers"


def test_dir_lists_the_public_names_alone():
    assert dir(hf_packfree) == sorted(hf_packfree.__all__)
    assert all(getattr(hf_packfree, name) is not None for name in dir(hf_packfree))


def test_importing_needs_no_transformers_and_changes_nothing():
    code = (
        "import sys, os; before = set(sys.modules), dict(os.environ)\nimport hf_packfree\nadded = "
        "{name.split('.')[0] for name in set(sys.modules) - before[0]}\nassert not added & "
        "{'torch', 'transformers', 'accelerate', 'rich', 'matplotlib', 'fla', 'triton'}, "
        "added\nassert dict(os.environ) == before[1]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_the_record_comes_without_the_compiler():
    """Who collates in worker processes imports it in each, and torch's compiler is large."""
    code = (
        "import sys; from hf_packfree import PackedSequence; PackedSequence.from_lengths([3])\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_stay_small():
    for file in HOUSE.rglob("*.py"):
        assert len(file.read_text().splitlines()) <= 400, (
            f"{file.relative_to(HOUSE)} wants splitting"
        )


def test_functions_fit_a_screen():
    """60 lines without the docstring; kernels of Triton, which call little, may be longer."""
    found = [
        f"{file.relative_to(HOUSE)}:{node.lineno} {node.name} wants splitting"
        for file in sorted(HOUSE.rglob("*.py"))
        if "kernels" not in str(file.relative_to(HOUSE))
        for node in nodes(file.read_text())
        if isinstance(node, ast.FunctionDef) and _lines(node) > 60
    ]
    assert found == []


def _lines(node: ast.FunctionDef) -> int:
    documented = ast.get_docstring(node) is not None
    said = node.body[0].end_lineno - node.body[0].lineno + 1 if documented else 0
    return node.end_lineno - node.lineno + 1 - said


def kinds():
    """Yield the kinds of files that repeat by convention, as what they are called: backends in every
    folder of an operation, parts of a chunked one, kernels of a fused one.
    """
    own = {"across_ranks", "fla", "reference", "torch_native", "triton_kernels", "triton_native"}
    yield "ops/*/{name}.py", own
    yield "ops/*/torch_chunked/{name}.py", {"chunks", "gradients", "passes"}
    yield "ops/fused/kernels/{name}.py", {"gates", "linear", "lora", "rope", "swiglu"}


def test_a_file_name_says_what_it_holds():
    """Two rooms with a `report.py` each have a name for neither."""
    by_convention = {
        file
        for pattern, names in kinds()
        for name in names
        for file in HOUSE.glob(pattern.format(name=name))
    }
    left = [file.name for file in HOUSE.rglob("*.py") if file not in by_convention]
    counted = Counter(name for name in left if not name.startswith("__"))
    assert {name: count for name, count in counted.items() if count > 1} == {}


def test_the_files_that_a_room_lists_are_there():
    listed = [
        room.with_name(f"{name}.py")
        for room in HOUSE.rglob("__init__.py")
        for name in re.findall(r"^- `(\w+)`:", room.read_text(), re.MULTILINE)
    ]
    assert listed and [str(file) for file in listed if not file.exists()] == []


def test_a_constant_is_a_line():
    """Two on one share a sentence, which explains neither."""
    found = [
        f"{file.relative_to(HOUSE)}:{node.lineno}"
        for file in sorted(HOUSE.rglob("*.py"))
        # the first is the module
        for node in nodes(file.read_text())[0].body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
    ]
    assert found == []


def test_public_names_are_documented():
    for name in hf_packfree.__all__:
        thing = getattr(hf_packfree, name)
        if callable(thing):
            assert inspect.getdoc(thing), f"{name} has no docstring"
            if hasattr(errors, name):
                continue
            signature = inspect.signature(thing)
            given = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
            for parameter in (
                given if not inspect.isclass(thing) or name == "PackFreeCallback" else []
            ):
                assert f"{parameter.name}" in inspect.getdoc(thing), (
                    f"{name} does not explain {parameter.name}"
                )
