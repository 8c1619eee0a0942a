"""Run the GPU measurements and tests within a budget, and leave one dated result.

    python -m tests.benchmarks.run_all --out DIR [--minutes 9] [--only REGEX] [--tests FILE ...] [--no-tests] [--no-rows]
    python -m tests.benchmarks.run_all --out DIR --assemble DIR1 DIR2 ...     # one result of several calls; runs nothing
    python -m tests.benchmarks.run_all --out DIR --device cpu --tiny          # a trial of the script itself

Leaves DIR/<date>-<gpu>.json: {"machine", "date", "versions", "options" (of
tests.benchmarks.measure), "source" (of the package, a hash), "commit", "rows", "errors", "tests"}. Rows,
errors, outcomes and how each file of tests ended are also appended as they come (rows.jsonl,
errors.jsonl, tests.jsonl, files.jsonl), so that a call that is cut off loses little: assemble it.
What pytest printed is in DIR/log. The exit status is 1 if a file of tests did not end well. Rows
are timed alone; files of tests, of which nothing is timed, run side by side after them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from tests.benchmarks.timing import DEAD, name_of, read_lines

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "gpu/test_ops.py",
    "gpu/test_score_options.py",
    "gpu/test_sync.py",
    "gpu/test_model.py",
    "gpu/test_training.py",
    "gpu/test_padded.py",
    "gpu/test_lora.py",
    "gpu/test_mtp.py",
    "gpu/test_loss.py",
    "gpu/test_towers.py",
    "gpu/test_shards.py",
    "gpu/test_autotune.py",
    "gpu/test_launch.py",
    "gpu/test_graphs.py",
    "gpu/test_graph_kernels.py",
    "gpu/test_layer_graphs.py",
    "gpu/test_in_graph.py",
    "gpu/test_trainer.py",
    "gpu/test_trees.py",
    "gpu/test_verify.py",
    "integrations/test_liger.py",
    "integrations/test_parallel.py",
)
"""Every file of tests that has the gpu marker; of each only what is marked runs."""
ENDS = {0: "passed", 1: "failed", 2: "interrupted", 5: "found no tests", None: "out of time"}
"""What pytest's exit status says; an import that fails interrupts."""
LONGEST, PROCESSES = "gpu/test_ops.py", 8
"""A file whose tests know nothing of each other, and the processes that share them where
pytest-xdist is installed.
"""
RESTARTS = 4
DEEP_PATH = re.compile(r"(?<![\w.])(?:/[\w.+-]+){2,}/([\w.+-]+/[\w.+-]+)")
"""An absolute path of four parts or more; its last two stay."""


def main(arguments: Sequence[str] | None = None) -> Path:
    """Run the chosen rows and tests and return the result's path."""
    options, rest = parse(arguments)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    folders = options.assemble or [options.out]
    if not options.assemble:
        deadline = time.monotonic() + options.minutes * 60
        about = run(
            [sys.executable, "-m", "tests.benchmarks.machine", options.device],
            options,
            120,
            subprocess.PIPE,
        )
        found = json.loads(about.strip().splitlines()[-1] if about else "{}") | {
            "options": rest,
            "source": source(),
            "commit": commit(),
        }
        (options.out / "machine.json").write_text(json.dumps(found))
        share = 1.0 if options.no_tests else options.share
        if not options.no_rows:
            measure(options, rest, time.monotonic() + (deadline - time.monotonic()) * share)
        with ThreadPoolExecutor(options.jobs) as pool:
            list(
                pool.map(
                    lambda name: test(name, options, deadline),
                    () if options.no_tests else options.tests,
                )
            )
    path = write(assemble(folders), options.out)
    print(f"wrote {path}")
    return path


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; what is not known here goes to tests.benchmarks.measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything together")
    parser.add_argument(
        "--share", type=float, default=0.55, help="of the minutes that the rows may take"
    )
    parser.add_argument(
        "--tests", nargs="*", default=TESTS, help=f"files in tests, of {', '.join(TESTS)}"
    )
    parser.add_argument(
        "--jobs", type=int, default=4, help="files of tests that run at the same time"
    )
    parser.add_argument(
        "--pytest", default="", help="more of pytest's options, in one string: '-k varlen'"
    )
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--no-rows", action="store_true")
    parser.add_argument(
        "--assemble", nargs="+", type=Path, help="folders of earlier calls, oldest first"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_known_args(arguments)


def source(tree: Path = ROOT) -> str:
    """Return what tells one state of the package from another: the first digits of its files'
    SHA-256.
    """
    digest = hashlib.sha256()
    for path in sorted((tree / "hf_packfree").rglob("*.py")):
        digest.update(path.relative_to(tree).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str:
    """Return the checkout's commit, "-dirty" behind it where files differ; "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    if which(command[0]) is None:
        return "unknown"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def measure(options: argparse.Namespace, rest: list[str], deadline: float) -> None:
    """Time the rows; a process whose device died is followed by a fresh one that goes on."""
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.measure",
        "--out",
        str(options.out),
        "--device",
        options.device,
        *rest,
    ]
    command += ["--tiny"] if options.tiny else []
    for turn in range(RESTARTS):
        minutes = (deadline - time.monotonic()) / 60
        again = ["--resume"] if turn else []
        status = run([*command, "--minutes", f"{minutes:.2f}", *again], options, minutes * 60 + 60)
        if status != DEAD:
            return


def test(name: str, options: argparse.Namespace, deadline: float) -> None:
    """Run one file of tests in a process of its own, and append how it ended."""
    began, left = time.monotonic(), deadline - time.monotonic()
    log = options.out / "log" / f"{name.replace('/', '-')}.txt"
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as output:
        status = (
            run(pytest_command(name, options.pytest), options, left, output) if left >= 10 else None
        )
    if status == 5 and options.pytest:
        # none of its tests was chosen
        return
    line = {"file": name, "end": ENDS.get(status, f"exit status {status}")}
    print(
        f"{log.read_text()[-4000:]}\n{name}: {line['end']}, {time.monotonic() - began:.0f} s",
        flush=True,
    )
    with (options.out / "files.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def pytest_command(name: str, more: str) -> list[str]:
    """The folder above's conftest needs packages that may be missing; what records outcomes is
    in tests/gpu's.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        f"tests/{name}",
        "-q",
        "-m",
        "gpu",
        "--confcutdir=tests/gpu",
        "-W",
        "default",
    ]
    recorder = [] if name.startswith("gpu/") else ["-p", "tests.gpu.conftest"]
    shared = ["-n", str(PROCESSES)] if name == LONGEST and find_spec("xdist") else []
    return [
        *command,
        *recorder,
        *shared,
        "-p",
        "no:cacheprovider",
        "--tb=short",
        *shlex.split(more),
    ]


def run(command: list[str], options: argparse.Namespace, seconds: float, output: Any = None) -> Any:
    """Run a command in the repository's root; return its exit status, or what it printed if
    `output` is a pipe.
    """
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    environment = {**os.environ, "PYTHONPATH": path, "PACKFREE_GPU_OUT": str(options.out)}
    if options.device == "cpu":
        environment["PACKFREE_GPU_TESTS"] = "cpu"
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            timeout=max(seconds, 1),
            text=True,
            stdout=output,
            stderr=None if output in (None, subprocess.PIPE) else subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired:
        print(f"stopped after {seconds:.0f} s: {' '.join(command)}", flush=True)
        return "" if output == subprocess.PIPE else None
    return done.stdout if output == subprocess.PIPE else done.returncode


def assemble(folders: Sequence[Path]) -> dict[str, Any]:
    """Return one result of the folders' lines; of rows, errors and outcomes of one name the last
    that ran counts.
    """
    rows: dict[Any, Any] = {}
    errors: dict[Any, Any] = {}
    tests: dict[str, Any] = {}
    files: dict[str, str] = {}
    about: dict[str, Any] = {}
    runs: dict[str, Any] = {}
    for number, folder in enumerate(folders, 1):
        machine = folder / "machine.json"
        about |= json.loads(machine.read_text()) if machine.exists() else {}
        runs[str(number)] = dict(about)
        for row in read_lines(folder / "rows.jsonl"):
            if "skipped" not in row or name_of(row) not in rows:
                rows[name_of(row)] = row | {"run": number}
        errors |= {
            (line["test"], line["what"]): line for line in read_lines(folder / "errors.jsonl")
        }
        tests |= {line["test"]: line for line in read_lines(folder / "tests.jsonl")}
        files |= {line["file"]: line["end"] for line in read_lines(folder / "files.jsonl")}
    found = {"machine": "", "date": "", "versions": {}, **about, "runs": runs}
    counted = outcomes(tests) | {"files": files}
    return found | {"rows": list(rows.values()), "errors": list(errors.values()), "tests": counted}


def outcomes(tests: dict[str, Any]) -> dict[str, Any]:
    """Count the tests' outcomes, and keep why those that did not pass did not."""
    names = ("passed", "failed", "skipped")
    found: dict[str, Any] = {
        name: sum(line["outcome"] == name for line in tests.values()) for name in names
    }
    found["not_passed"] = [
        {"test": line["test"], "outcome": line["outcome"], "reason": line["reason"]}
        for line in tests.values()
        if line["outcome"] != "passed"
    ]
    return found


def write(result: dict[str, Any], folder: Path) -> Path:
    """Write the result under its date and machine; `runs` says of each row's run when, on what and
    with what it was made.
    """
    name = (
        re.sub(r"[^a-z0-9]+", "-", f"{result['date']} {result['machine']}".lower()).strip("-")
        or "unknown"
    )
    path = folder / f"{name}.json"
    names = ("machine", "processor", "date", "versions", "options", "source", "commit", "runs")
    head = {key: result[key] for key in names if key in result}
    lists = {key: [json.dumps(item) for item in result[key]] for key in ("rows", "errors")}
    text = json.dumps(head, indent=1)[:-2]
    for key, items in lists.items():
        text += (
            f',\n "{key}": [\n  ' + ",\n  ".join(items) + "\n ]" if items else f',\n "{key}": []'
        )
    text += f',\n "tests": {json.dumps(result["tests"], indent=1)}\n}}\n'
    # whose machine it was is nobody's business
    path.write_text(DEEP_PATH.sub(r"\1", text))
    return path


def ended_well(result: Path) -> bool:
    """Whether every file of tests that the result knows of passed."""
    return set(json.loads(result.read_text())["tests"]["files"].values()) <= {"passed"}


if __name__ == "__main__":
    sys.exit(0 if ended_well(main()) else 1)
