"""The notebooks run, end in asserts, use public names alone, and are stored without outputs."""

from __future__ import annotations

import ast
import os
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import hf_packfree

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def packages(path):
    """The packages a notebook imports."""
    nodes = list(ast.walk(ast.parse("\n".join(cell.source for cell in code_cells(path)))))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.split(".")[0] for name in plain | {node.module for node in nodes if isinstance(node, ast.ImportFrom)}}


def test_they_are_numbered():
    assert NOTEBOOKS, "found no notebook"
    assert [path.stem.split("_")[0] for path in NOTEBOOKS] == [str(n) for n in range(1, len(NOTEBOOKS) + 1)]


@each_notebook
def test_stored_without_outputs(path):
    assert all(not cell.outputs and cell.execution_count is None for cell in code_cells(path))


@each_notebook
def test_imports_public_names_alone(path):
    tree = ast.parse("\n".join(cell.source for cell in code_cells(path)))
    plain = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert not [name for name in plain if name.startswith("hf_packfree")], "import the names instead"
    ours = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module.startswith("hf_packfree")]
    assert ours and all(node.module == "hf_packfree" for node in ours)
    assert {alias.name for node in ours for alias in node.names} <= set(hf_packfree.__all__)


@each_notebook
def test_ends_in_an_assert(path):
    assert isinstance(ast.parse(code_cells(path)[-1].source).body[-1], ast.Assert)


@each_notebook
@pytest.mark.filterwarnings("default")  # jupyter's own warnings are not ours to mend
def test_runs(path, tmp_path, monkeypatch):
    missing = sorted(name for name in packages(path) if find_spec(name) is None)
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    assert [output for output in outputs if "image/png" in output.get("data", {})], "a notebook without a picture"
