"""Requirements of TileLang's kernels besides packages: the CUDA compiler, and no environment
variable that switches them off.

Nothing here needs torch, so that the doctor works where torch is broken.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from shutil import which


def tilelang_off() -> str | None:
    """Return the environment variable that keeps flash-linear-attention from TileLang, or None."""
    settings = (("FLA_TILELANG", "0"), ("FLA_DISABLE_BACKEND_DISPATCH", "1"))
    return next(
        (f"{name}={value}" for name, value in settings if os.environ.get(name) == value), None
    )


def flash_qla_off() -> str | None:
    """Return the environment variable that keeps flash-linear-attention, and this package, from
    FlashQLA, or None.
    """
    return "FLA_FLASH_QLA=0" if os.environ.get("FLA_FLASH_QLA") == "0" else None


def has_nvcc() -> bool:
    """Whether TileLang finds nvcc: on the path, under CUDA_HOME, or from NVIDIA's wheel."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    if which("nvcc") is not None or any(
        home and (Path(home) / "bin" / "nvcc").exists() for home in homes
    ):
        return True
    try:
        return any(file.name in ("nvcc", "nvcc.exe") for file in files("nvidia-cuda-nvcc") or ())
    except PackageNotFoundError:
        return False
