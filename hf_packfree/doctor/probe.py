"""Import packages in another process, so that one that crashes or prints harms nothing here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Probe:
    """One import: the module's own `__version__`, and the exception that it raised."""

    version: str | None
    error: str | None


_PROGRAM = """
import importlib, json, os, sys
report = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.path[:] = json.loads(sys.argv[1])
for name in sys.argv[2:]:
    report.write(json.dumps([name, None]) + "\\n")
    report.flush()
    version = error = None
    try:
        importlib.import_module(name)
        version = getattr(sys.modules[name.partition(".")[0]], "__version__", None)
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}".strip().splitlines()[0]
    report.write(json.dumps([name, {"version": version and str(version), "error": error}]) + "\\n")
    report.flush()
"""


def probe(modules: Sequence[str], *, timeout: float = 300.0) -> dict[str, Probe]:
    """Import each module once, in another process, so that one that crashes or prints harms nothing here.

    Args:
        modules: dotted names; those after one that crashed are imported in a fresh process.
        timeout: seconds for all of them.
    """
    results: dict[str, Probe] = {}
    while waiting := [module for module in modules if module not in results]:
        lines, end = _run_probe(waiting, timeout)
        results |= {name: Probe(**result) for name, result in lines if result}
        started = [name for name, result in lines if not result]
        crashed = next((name for name in started if name not in results), None)
        if crashed is None and waiting[0] not in results:  # the interpreter itself does not start
            crashed = waiting[0]
        if crashed is not None:
            results[crashed] = Probe(None, end)
    return results


def _run_probe(modules: Sequence[str], timeout: float) -> tuple[list[Any], str]:
    paths = [str(Path(entry).absolute()) if entry else os.getcwd() for entry in sys.path]
    command = [sys.executable, "-c", _PROGRAM, json.dumps(paths), *modules]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        output, end = done.stdout, f"importing it ends the interpreter ({_exit_of(done.returncode)})"
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        end = f"importing it takes longer than {timeout:.0f} seconds"
    return [json.loads(line) for line in output.splitlines() if line.endswith("]")], end


def _exit_of(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"
