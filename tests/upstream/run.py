"""Run transformers' own tests of the supported families, unpatched and with every model patched,
and compare test by test.

    python -m tests.upstream.run                                    the newest release, and the oldest
    python -m tests.upstream.run 5.16.1                             this one
    python -m tests.upstream.run 5.23.0 --checkout ../transformers  the families' own files, generation included

Source distributions hold the common tests of models, which run on the models of
`tests/upstream/families.py`; the tests of generation, and the families' own files, are in the
repository alone.

Exit code 0: what passes unpatched passes patched; 1: a test does not; 2: tests or an environment
cannot be had.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from hf_packfree.versions import VERSIONS
from tests.compat.environments import CannotMake, environments
from tests.upstream.outcomes import Outcomes, lost, read, table_of
from tests.upstream.sources import CannotFetch, check_checkout, tests_of

HERE = Path(__file__).parent
FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
LEFT_OUT = ("training_overfit", "compil", "sdpa_kernels", "fp16", "Integration")
"""Parts of names: models are trained or compiled for minutes; kernels' switches and half
precision say nothing on a CPU.
"""


def main() -> int:
    """Run, print a table per release and what is lost, and return the exit code."""
    options, console = _options(), Console(width=None if sys.stdout.isatty() else 150)
    failed = 0
    for version in options.versions or reversed(VERSIONS["transformers"].cpu):
        begun = time.monotonic()
        try:
            python = environments(version, options.cache / "compat").bare
            own = options.checkout is not None
            tree = (
                check_checkout(options.checkout, version)
                if own
                else tests_of(version, options.cache / "upstream")
            )
            with ThreadPoolExecutor(2) as pool:
                runs = [pool.submit(run, python, tree, patched, own) for patched in (False, True)]
                unpatched, patched = (run.result() for run in runs)
        except (CannotMake, CannotFetch) as error:
            console.print(str(error), style="red", markup=False)
            return 2
        minutes = f"{(time.monotonic() - begun) / 60:.1f} minutes"
        console.print(table_of(f"transformers {version}, {minutes}", unpatched, patched))
        gone = lost(unpatched, patched)
        for name, why in gone.items():
            console.print(
                f"{name} passes unpatched, and patched is {why[:600]}", style="red", markup=False
            )
        failed += len(gone)
    console.print(
        f"{failed} tests pass unpatched alone."
        if failed
        else "Whatever passes unpatched passes patched."
    )
    return 1 if failed else 0


def run(python: Path, tree: Path, patched: bool, checkout: bool) -> Outcomes:
    """Return the outcomes of one run in one process.

    Raises:
        CannotFetch: nothing passed, so that nothing would be compared.
    """
    own = [tree / "tests" / "models" / family / f"test_modeling_{family}.py" for family in FAMILIES]
    files = own if checkout else [HERE / "families.py"]
    options = [
        "-q",
        "-p",
        "plugin",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        "-k",
        " and ".join(f"not {n}" for n in LEFT_OUT),
    ]
    path = os.pathsep.join(map(str, (HERE, tree, HERE.parents[1])))
    settings = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        report, no_settings = Path(folder) / "report.xml", Path(folder) / "pytest.ini"
        no_settings.write_text("[pytest]\n")
        options += (
            ["-o", "log_cli=0"]
            if checkout
            else ["--noconftest", "-c", str(no_settings), "--rootdir", str(tree)]
        )
        command = [
            str(python),
            "-m",
            "pytest",
            *options,
            f"--junitxml={report}",
            *["--patched"] * patched,
            *map(str, files),
        ]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, env=settings)
        found = read(report) if report.exists() else {}
    if not any(outcome.verdict == "passed" for outcome in found.values()):
        raise CannotFetch(
            f"found no test of {tree} that passes {'patched' if patched else 'unpatched'}; wanted "
            f"those of the release's "
            f"common tests; the end of pytest's output:\n{(done.stdout + done.stderr)[-2000:]}"
        )
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", help="releases (default: the newest and the oldest)")
    parser.add_argument("--checkout", type=Path, help="of transformers' repository at that release")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path.home() / ".cache" / "hf_packfree",
        help="environments and tests",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
