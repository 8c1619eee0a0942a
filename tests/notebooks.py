"""Run the notebooks and keep what they show: small text and pictures, and a hash of the cells they
came from.

python -m tests.notebooks              run all of them here, write their outputs into notebooks/
python -m tests.notebooks 1_see        those whose names begin so
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RECORD = "executed_sources"
"""The notebook's metadata that says which cells the outputs came from."""


def sources_hash(notebook: NotebookNode) -> str:
    """Return a hash of the code cells; the text between them may change without running
    anything.
    """
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:16]


def execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Run a notebook in `folder`, with this checkout's package, and return it with outputs.

    Raises:
        CellExecutionError: a cell failed; every notebook ends in an assert.
    """
    # tqdm's, without widgets; and no line about a patched model on stderr
    environment = {
        "IPYTHONDIR": str(folder / "ipython"),
        "PYTHONWARNINGS": "ignore:IProgress",
        "PACKFREE_QUIET": "1",
    }
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    )
    client = NotebookClient(
        notebook,
        timeout=900,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    return client.execute(env={**os.environ, **environment})


def shrink(notebook: NotebookNode) -> None:
    """Store every picture with a palette of 256 colours: half the bytes."""
    from PIL import Image

    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        if "image/png" in output.get("data", {}):
            picture = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))).convert(
                "RGB"
            )
            small = io.BytesIO()
            picture.quantize(256, Image.Quantize.MAXCOVERAGE).save(small, "png", optimize=True)
            output.data["image/png"] = base64.b64encode(small.getvalue()).decode()


def main() -> None:
    """Run the notebooks and write them back."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("begin", nargs="*", default=[""], help="how their names begin")
    chosen = tuple(parser.parse_args().begin)
    for path in (path for path in NOTEBOOKS if path.name.startswith(chosen)):
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            execute(notebook, Path(folder))
        shrink(notebook)
        notebook.metadata[RECORD] = sources_hash(notebook)
        # the kernel adds the Python release
        notebook.metadata.language_info = {"name": "python"}
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
