"""What a result was made on.

python -m tests.benchmarks.machine [cuda|cpu]      # prints it as JSON
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "fla-core",
    "flash-qla",
    "tilelang",
    "liger-kernel",
    "nvidia-cutlass-dsl",
    "trl",
    "cut-cross-entropy",
    "peft",
    "causal-conv1d",
    "mamba-ssm",
    "flash-attn",
)


def machine(device: str = "cuda") -> dict[str, Any]:
    """Return {"machine", "processor", "date", "versions"} of this process; the machine is the
    GPU's name, if there is one.
    """
    from hf_packfree import __version__
    from hf_packfree.ops.backend import installed

    gpu = device == "cuda" and torch.cuda.is_available()
    name = torch.cuda.get_device_name() if gpu else f"CPU {platform.machine()}"
    versions = {package: installed(package) for package in PACKAGES}
    versions |= {
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "hf_packfree": __version__,
    }
    return {
        "machine": name,
        "processor": _processor(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "versions": {package: found for package, found in versions.items() if found},
    }


def _processor() -> str:
    """Its model where Linux names it, and how many cores this process may use."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
    return f"{model}, {os.cpu_count()} cores"


if __name__ == "__main__":
    print(json.dumps(machine(*sys.argv[1:2])))
