"""The notebooks run, end in asserts, use public names alone, and are stored with small outputs
of the cells they have.
"""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec

import nbformat
import pytest

import hf_packfree
import hf_packfree.data
import hf_packfree.mtp
from tests.notebooks import NOTEBOOKS, RECORD, execute, sources_hash

LARGEST = 200_000
"""Bytes of a notebook with its outputs."""
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def packages(path):
    """The packages a notebook imports."""
    nodes = list(ast.walk(ast.parse("\n".join(cell.source for cell in code_cells(path)))))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {
        name.split(".")[0]
        for name in plain | {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    }


def test_they_are_numbered():
    assert NOTEBOOKS, "found no notebook"
    assert [path.stem.split("_")[0] for path in NOTEBOOKS] == [
        str(n) for n in range(1, len(NOTEBOOKS) + 1)
    ]


def outputs_of(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def has_pictures(notebook):
    return any("image/png" in output.get("data", {}) for output in outputs_of(notebook))


@each_notebook
def test_stored_outputs_are_of_these_cells(path):
    """If not: python -m tests.notebooks."""
    assert nbformat.read(path, as_version=4).metadata.get(RECORD) == sources_hash(
        nbformat.read(path, as_version=4)
    )


@each_notebook
def test_stored_outputs_are_small_and_name_no_machine(path):
    notebook = nbformat.read(path, as_version=4)
    assert has_pictures(notebook) and path.stat().st_size < LARGEST
    texts = [output for output in outputs_of(notebook) if output.output_type == "stream"]
    assert texts and {output.name for output in texts} == {"stdout"}, "a warning"
    assert not [output.text for output in texts if re.search(r"(?<!\w)/\w+/\w+", output.text)], (
        "a path"
    )


@each_notebook
def test_imports_public_names_alone(path):
    tree = ast.parse("\n".join(cell.source for cell in code_cells(path)))
    plain = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    assert not [name for name in plain if name.startswith("hf_packfree")], (
        "import the names instead"
    )
    ours = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("hf_packfree")
    ]
    public = {
        module.__name__: set(module.__all__)
        for module in (hf_packfree, hf_packfree.data, hf_packfree.mtp)
    }
    assert ours and all(
        {alias.name for alias in node.names} <= public.get(node.module, set()) for node in ours
    )


@each_notebook
def test_ends_in_an_assert(path):
    assert isinstance(ast.parse(code_cells(path)[-1].source).body[-1], ast.Assert)


def trained_for_less(notebook):
    """What the notebooks assert holds after little more than half their steps; the stored
    outputs are of all of them.
    """
    steps = re.compile(r"(?<=STEPS = )(.*?)(\d+)$", re.M)
    for cell in notebook.cells:
        cell.source = steps.sub(lambda line: f"{line[1]}{int(line[2]) // 2 + 1}", cell.source)
    return notebook


@each_notebook
# jupyter's own warnings are not ours to mend
@pytest.mark.filterwarnings("default")
@pytest.mark.slow
def test_runs(path, tmp_path):
    missing = sorted(name for name in packages(path) if find_spec(name) is None)
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed")
    notebook = execute(trained_for_less(nbformat.read(path, as_version=4)), tmp_path)
    assert not [output for output in outputs_of(notebook) if output.output_type == "error"]
    assert has_pictures(notebook)
