"""What packed rows need of other packages and of the CUDA toolkit; nothing here needs torch, so that the doctor can read it."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from shutil import which

from packaging.version import Version


class Fault(str):
    """Why a kernel cannot run that lies in what is installed: broken, too old or left out by a setting, so it can be mended."""


FLA_FLOOR = "0.5.2"
"""Every release of fla-core before it computes packed rows wrong, or fails on them, in at least one case."""

FLASH_QLA_FLOOR = "0.1.3"
"""Releases of flash-qla before it cannot be told where documents lie without waiting for the device."""

CAUSAL_CONV1D_FLOOR = "1.6.0"
"""Releases of causal-conv1d before it do not heed torch.use_deterministic_algorithms."""

WRONG_TRITON = ("3.4.0", "3.7.1")
"""From the first, and before the second, Triton compiles FLA's gated backward wrongly on Hopper (FLA's issue 640)."""

HOPPER_ADVICE = "pip install flash-qla or tilelang, and nvcc with it, or 'triton>=3.7.1' with a torch that takes it"
"""What mends that; nvcc is part of the CUDA toolkit."""


def tilelang_off() -> str | None:
    """Return the setting by which flash-linear-attention leaves TileLang alone, or None."""
    settings = (("FLA_TILELANG", "0"), ("FLA_DISABLE_BACKEND_DISPATCH", "1"))
    return next((f"{name}={value}" for name, value in settings if os.environ.get(name) == value), None)


def flash_qla_off() -> str | None:
    """Return the setting by which flash-linear-attention leaves FlashQLA alone, which we heed too, or None."""
    return "FLA_FLASH_QLA=0" if os.environ.get("FLA_FLASH_QLA") == "0" else None


def too_old(package: str, found: str | None, floor: str, reason: str) -> str | None:
    """Return that release `found` of a package is before `floor`, which rules it out for a reason, or None.

    One whose release is not known, run from its sources, is taken.
    """
    if found is None or Version(found) >= Version(floor):
        return None
    return Fault(f"{package} {found} is too old {reason}; pip install '{package}>={floor}'")


def has_nvcc() -> bool:
    """Whether TileLang finds the compiler it calls: on the path, under CUDA_HOME, or from NVIDIA's wheel."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    if which("nvcc") is not None or any(home and (Path(home) / "bin" / "nvcc").exists() for home in homes):
        return True
    try:
        return any(file.name in ("nvcc", "nvcc.exe") for file in files("nvidia-cuda-nvcc") or ())
    except PackageNotFoundError:
        return False
