"""Environments of the releases: each borrows torch and the test tools and adds transformers with
its requirements.

They are made once and kept. Before each use the borrowed folder is brought up to date and the
environment is tried, so that those of another checkout or another interpreter serve again or are
made anew.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

FAKES = Path(__file__).parents[1] / "fakes"


class CannotMake(RuntimeError):
    """An environment cannot be made; the message says which, why, and what to do."""


@dataclass(frozen=True)
class Environments:
    """The two interpreters of a release.

    Attributes:
        bare: has this transformers and no kernel package.
        kernels: has the `kernels` that this transformers requires as well; the bare one where the
            index has none in range.
        version: of `kernels`, or None.
    """

    bare: Path
    kernels: Path
    version: str | None


def environments(version: str, folder: Path) -> Environments:
    """Return the environments of a release, made under `folder` if they are not there.

    Raises:
        CannotMake: one of them cannot be made.
    """
    purelib = Path(sysconfig.get_paths()["purelib"])
    loads = (
        f"{_has(version)}; from transformers.dependency_versions_table import deps; "
        f"print(deps['kernels'])"
    )
    bare, wanted = _environment(
        folder / f"transformers-{version}", [purelib], f"transformers=={version}", loads
    )
    accepts = (
        f"{_has(version)}; from transformers.utils import import_utils; assert "
        f"import_utils.is_kernels_available()"
    )
    reports = f"{accepts}; from importlib.metadata import version; print(version('kernels'))"
    home, borrowed = folder / f"transformers-{version}-kernels", [_site(bare.parents[1]), purelib]
    try:
        return Environments(bare, *_environment(home, borrowed, wanted, reports))
    except CannotMake as error:
        if "No matching distribution" not in str(error) or "from versions: none" in str(error):
            raise
        return Environments(bare, bare, None)


def _has(version: str) -> str:
    """A program that fails unless the test tools are there and this transformers is content with
    its dependencies.
    """
    tools = (
        "from importlib.util import find_spec; assert all(map(find_spec, ('torch', 'pytest', "
        "'hypothesis')))"
    )
    return f"{tools}; import transformers; assert transformers.__version__ == {version!r}"


def _environment(
    home: Path, borrowed: list[Path], requirement: str, works: str
) -> tuple[Path, str]:
    """Return the interpreter and what `works` prints in it, the environment made if that fails."""
    python = home / "bin" / "python"
    if python.exists():
        _borrow(home, borrowed)
    done = _run(python, "-c", works) if python.exists() else None
    if done is None or done.returncode:
        venv.create(home, with_pip=False, clear=True)
        _borrow(home, borrowed)
        done = _run(
            Path(sys.executable), "-m", "pip", "--python", str(python), "install", "-q", requirement
        )
        done = done if done.returncode else _run(python, "-c", works)
        if done.returncode:
            raise CannotMake(
                f"found no way to make {home} with {requirement}; wanted one in which that can be "
                "imported; check the network, and that it fits Python "
                f"{sys.version_info[0]}.{sys.version_info[1]}. The end of pip's "
                f"output:\n{done.stderr.strip()[-1000:]}"
            )
    return python, done.stdout.strip()


def _borrow(home: Path, folders: list[Path]) -> None:
    (_site(home) / "borrowed.pth").write_text("".join(f"{folder}\n" for folder in folders))


def _site(home: Path) -> Path:
    (site,) = home.glob("lib/python*/site-packages")
    return site


def _run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(python), *arguments], capture_output=True, text=True)
