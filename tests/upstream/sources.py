"""transformers' own tests of a release: from its source distribution, or from a checkout of its
repository.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from packaging.version import Version

ABSENT = {
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
}
"""What the common tests import and source distributions leave out: they hold tests/*.py and no
folder below.
"""


class CannotFetch(RuntimeError):
    """The tests of a release cannot be had; the message says which, why, and what to do."""


def tests_of(version: str, folder: Path) -> Path:
    """Return a folder whose `tests` is transformers' package, from the source distribution, kept
    under `folder`.

    Raises:
        CannotFetch: the index has no such source distribution, or cannot be reached.
    """
    home = folder / f"transformers-{version}"
    if (home / "complete").exists():
        return home
    shutil.rmtree(home, ignore_errors=True)
    with tempfile.TemporaryDirectory() as place:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            "transformers",
            "--dest",
            place,
        ]
        done = subprocess.run(
            [*command, f"transformers=={version}"], capture_output=True, text=True
        )
        # there before pip builds its metadata, which may fail
        archives = list(Path(place).glob("*.tar.gz"))
        if not archives:
            raise CannotFetch(
                f"found no way to fetch the source distribution of transformers {version}; wanted "
                "it for its tests; check the network, or pass a checkout. The end of pip's "
                f"output:\n{done.stderr.strip()[-1000:]}"
            )
        with tarfile.open(archives[0]) as archive:
            members = [
                member
                for member in archive.getmembers()
                if Path(member.name).parts[1:2] == ("tests",)
            ]
            archive.extractall(place, members=members, filter="data")
        shutil.copytree(
            Path(place) / archives[0].name.removesuffix(".tar.gz") / "tests", home / "tests"
        )
    for name, text in ABSENT.items():
        (home / "tests" / name).parent.mkdir(exist_ok=True)
        (home / "tests" / name).write_text(text)
        (home / "tests" / name).with_name("__init__.py").touch()
    (home / "tests" / "__init__.py").touch()
    (home / "complete").touch()
    return home


def check_checkout(folder: Path, version: str) -> Path:
    """Return `folder` if it is a checkout of that release.

    Raises:
        CannotFetch: it is not.
    """
    source = folder / "src" / "transformers" / "__init__.py"
    found = (
        [
            line.split('"')[1]
            for line in source.read_text().splitlines()
            if line.startswith("__version__")
        ]
        if source.exists()
        else []
    )
    if not found or Version(found[0]).release[:2] != Version(version).release[:2]:
        raise CannotFetch(
            f"found transformers {' '.join(found) or 'nowhere'} in {folder}; wanted a checkout of "
            f"its repository at "
            f"{version}, as its tests fit no other release; check out its tag v{version}"
        )
    return folder
