"""Run the tests marked `compat` on several releases of transformers, each in an environment of its own.

    python -m tests.compat.run                  one release of each era
    python -m tests.compat.run --all --readme   all of them; puts the table into README.md
    python -m tests.compat.run 5.8.1 5.23.0     these

An environment borrows torch and everything else from the one this runs in and adds transformers with the huggingface_hub
and tokenizers it asks for.  It is made once and kept.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).parents[2]
ALL = (
    "5.2.0", "5.3.0", "5.4.0", "5.8.1", "5.9.0", "5.12.1", "5.13.1", "5.14.1",
    "5.15.1", "5.16.1", "5.17.0", "5.19.0", "5.20.2", "5.22.2", "5.23.0",
)  # fmt: skip
ERAS = ("5.2.0", "5.8.1", "5.12.1", "5.14.1", "5.17.0", "5.22.2", "5.23.0")
"""The oldest, the newest, and the last release before each difference named in models/eras.py and facts of upstream."""

MARK = "<!-- compat -->"


def environment(version: str, folder: Path) -> Path:
    """Return the interpreter of an environment that has this transformers, made if it is not there."""
    home = folder / f"transformers-{version}"
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        venv.create(home, with_pip=False, clear=True)
        purelib = sysconfig.get_paths()["purelib"]
        (site,) = home.glob("lib/python*/site-packages")
        (site / "borrowed.pth").write_text(purelib + "\n")
        install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", f"transformers=={version}"]
        subprocess.run(install, check=True, cwd=ROOT, capture_output=True)
        (home / "complete").touch()
    return python


def measure(python: Path, workers: int) -> tuple[dict[tuple[str, str], list[tuple[float, float]]], list[str]]:
    """Return {(family, attention): [(logit error, gradient error)]} and the names of tests that failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-m", "compat", f"-n{workers}", f"--junitxml={report}", "-p", "no:cacheprovider"]
        command = [str(python), "-m", "pytest", *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        if not report.exists():
            raise RuntimeError(f"pytest wrote no report:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return _read(ElementTree.parse(report))


def _read(report: ElementTree.ElementTree) -> tuple[dict[tuple[str, str], list[tuple[float, float]]], list[str]]:
    numbers: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    failed = []
    for case in report.iter("testcase"):
        facts = {entry.get("name"): entry.get("value") for entry in case.iter("property")}
        if "logits" in facts:
            numbers[facts["family"], facts["attention"]].append((float(facts["logits"]), float(facts["gradients"])))
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(case.get("name"))
    return numbers, failed


def rows_of(version: str, numbers, failed) -> list[tuple[str, ...]]:
    """Return one table row: the release, then per family and attention the worst errors."""
    families = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
    cells = []
    for family in families:
        for attention in ("sdpa", "eager"):
            measured = numbers.get((family, attention), [])
            worst = [max(column) for column in zip(*measured)] if measured else None
            bad = [name for name in failed if f"[{family}-" in name and attention in name]
            verdict = "fails" if bad or worst is None else "exact"
            cells.append(f"{verdict} {worst[0]:.0e} / {worst[1]:.0e}" if worst else verdict)
    return [(version, *cells)]


HEAD = ("transformers", *(f"{f} {a}" for f in ("Qwen3.5", "Qwen3.5-MoE", "Qwen3-Next") for a in ("sdpa", "eager")))


def markdown(rows: list[tuple[str, ...]]) -> str:
    """Return the README's table, with the day it was made."""
    day = datetime.date.today().isoformat()
    lines = [f"Made on {day} by `python -m tests.compat.run --all --readme`; worst relative RMS of logits / gradients.", ""]
    lines += ["| " + " | ".join(row) + " |" for row in (HEAD, ("---",) * len(HEAD), *rows)]
    return "\n".join(lines)


def write_readme(table: str) -> None:
    """Put the table between the two marks in README.md."""
    readme = ROOT / "README.md"
    text = readme.read_text()
    readme.write_text(re.sub(f"{MARK}.*?{MARK}", lambda _: f"{MARK}\n{table}\n{MARK}", text, flags=re.S))


def main() -> int:
    """Run, print the table, and return 0 if everything is exact."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help="releases; one of each era if none are named")
    parser.add_argument("--all", action="store_true", help="every release that is promised")
    parser.add_argument("--envs", type=Path, default=Path.home() / ".cache" / "hf_packfree" / "compat")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--readme", action="store_true", help="write the table into README.md")
    options = parser.parse_args()
    versions = options.versions or (ALL if options.all else ERAS)
    console, rows, broken = Console(), [], []
    with Progress(console=console, transient=True) as progress:
        for version in progress.track(versions, description="releases"):
            numbers, failed = measure(environment(version, options.envs), options.workers)
            rows += rows_of(version, numbers, failed)
            console.print(" | ".join(rows[-1]))
            broken += [f"{version}: {name}" for name in failed] + ([] if numbers else [f"{version}: no test ran"])
    table = Table(*HEAD, title="worst relative RMS of logits / gradients against one-by-one")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for line in broken:
        console.print(line, style="red")
    if options.readme:
        write_readme(markdown(rows))
    verdict = f"{len(broken)} tests fail" if broken else "exact on every one of them"
    console.print(f"{len(versions)} releases of transformers: {verdict}.")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
