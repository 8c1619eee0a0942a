"""What a result was made on.

    python -m tests.gpu.machine [cuda|cpu]      # prints it as JSON
"""

from __future__ import annotations

import datetime
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

PACKAGES = (
    "torch", "triton", "transformers", "fla-core", "flash-qla", "tilelang", "liger-kernel", "causal-conv1d", "flash-attn",
)


def machine(device: str = "cuda") -> dict[str, Any]:
    """Return {"machine", "date", "versions"} of this process; the GPU's name, or the processor's."""
    from hf_packfree import __version__

    gpu = device == "cuda" and torch.cuda.is_available()
    name = torch.cuda.get_device_name() if gpu else f"CPU {platform.machine()}"
    versions = {package: _installed(package) for package in PACKAGES}
    versions |= {"python": platform.python_version(), "cuda": torch.version.cuda, "hf_packfree": __version__}
    return {
        "machine": name,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "versions": {package: found for package, found in versions.items() if found},
    }


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(json.dumps(machine(*sys.argv[1:2])))
