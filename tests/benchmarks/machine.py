"""What a result was made on.

python -m tests.benchmarks.machine [cuda|cpu]      # prints it as JSON
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
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
    GPU's name, if there is one, the processor also says how many cores it has.
    """
    from hf_packfree import __version__
    from hf_packfree.bench.measure import processor
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
        "processor": f"{processor() or platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "versions": {package: found for package, found in versions.items() if found},
    }


if __name__ == "__main__":
    print(json.dumps(machine(*sys.argv[1:2])))
