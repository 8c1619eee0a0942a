"""The machine: system, Python, GPU, driver, compiler. Nothing here needs torch."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from shutil import which

from hf_packfree.ops.toolkit import has_nvcc

_SMI = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,driver_version,compute_cap",
    "--format=csv,noheader",
)


def machine() -> dict[str, str]:
    """Return {item: what was found}, in the order of the issue form."""
    return {
        "OS": platform.platform(),
        "Python": f"{platform.python_version()} ({sys.executable})",
        "GPU, driver": _gpus(),
        "nvcc": _nvcc(),
    }


def _gpus() -> str:
    """Return the GPUs and driver by nvidia-smi, since torch may be built without CUDA, or for
    another version.
    """
    lines = _output(_SMI)
    if lines is None:
        return "nvidia-smi is not found, or fails"
    found = []
    for line in filter(None, lines.splitlines()):
        name, memory, driver, capability = (f"{line},,,").split(",")[:4]
        parts = (memory.strip(), f"driver {driver.strip()}", f"capability {capability.strip()}")
        found.append(f"{name.strip()} ({', '.join(parts)})")
    return "; ".join(found) or "nvidia-smi sees none"


def _nvcc() -> str:
    found = re.search(r"release ([\d.]+)", _output(("nvcc", "--version")) or "")
    if found:
        return found[1]
    return "found, not on the path" if has_nvcc() else "not found"


def _output(command: Sequence[str]) -> str | None:
    """Return a program's output, or None if the program is missing, fails, or takes too long."""
    if which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
