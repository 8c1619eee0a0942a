"""The state of each package: usable, unused, absent, too old or broken, and why.

Nothing here needs torch, so the doctor can say what is wrong with torch itself.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from hf_packfree.ops.toolkit import flash_qla_off, has_nvcc, tilelang_off
from hf_packfree.versions import FLA_BACKWARD_WRONG_ON_HOPPER, HOPPER_ADVICE, VERSIONS, Versions

State = Literal["usable", "unused", "absent", "too old", "broken"]


@dataclass(frozen=True)
class Requirement:
    """The doctor's requirements of one package.

    Attributes:
        versions: its name and the releases that fit.
        module: the module that is imported to see whether the package works.
        purpose: what it is for.
        required: whether this package cannot do without it.
        cuda: whether the package is only of use on CUDA devices.
        other_names: distributions that hold the same module.
    """

    versions: Versions
    module: str
    purpose: str
    required: bool = False
    cuda: bool = False
    other_names: tuple[str, ...] = ()


def _row(name: str, module: str, purpose: str, **options: Any) -> Requirement:
    return Requirement(VERSIONS.get(name, Versions(name)), module, purpose, **options)


REQUIREMENTS = (
    _row("torch", "torch", "runs everything", required=True),
    _row("numpy", "numpy", "plans of packed rows", required=True),
    _row("transformers", "transformers", "the models", required=True),
    _row("accelerate", "accelerate", "the Trainer", required=True),
    _row("packaging", "packaging", "compares releases", required=True),
    _row("rich", "rich", "tables of the command line", required=True),
    _row("triton", "triton", "compiles FLA's kernels and ours", cuda=True),
    _row(
        "fla-core",
        "fla.ops.gated_delta_rule",
        "delta rule kernels (flash-linear-attention)",
        cuda=True,
        other_names=("flash-linear-attention",),
    ),
    _row("causal-conv1d", "causal_conv1d", "convolution kernel", cuda=True),
    _row(
        "flash-qla",
        "flash_qla",
        "delta rule kernels for compute capability 9.0, 10.0 and 10.3",
        cuda=True,
    ),
    _row("tilelang", "tilelang", "compiles FlashQLA's and some of FLA's kernels", cuda=True),
    _row("mamba-ssm", "mamba_ssm", "Mamba-2 kernels", cuda=True),
    _row("flash-attn", "flash_attn", "attention kernels", cuda=True),
    _row("kernels", "kernels", "kernels from the hub"),
    _row("liger-kernel", "liger_kernel", "fused losses and norms", cuda=True),
    _row("peft", "peft", "adapters"),
    _row("trl", "trl", "more trainers"),
    _row("bitsandbytes", "bitsandbytes", "QLoRA", cuda=True),
    _row("deepspeed", "deepspeed", "ZeRO", cuda=True),
    _row("torchvision", "torchvision", "image and video processors"),
    _row("pillow", "PIL", "images"),
    _row("matplotlib", "matplotlib", "the pictures of packfree demo and bench"),
)
"""The packages that the doctor examines."""


@dataclass(frozen=True)
class Package:
    """The doctor's findings on one package.

    Attributes:
        version: the installed version, or None.
        state: of the package; `reason` says why, `advice` what to do about it.
        purpose: what it is for.
        imports: whether importing it works.
        required: whether nothing works without it.
    """

    name: str
    version: str | None
    state: State
    purpose: str
    imports: bool = True
    reason: str | None = None
    advice: str | None = None
    required: bool = False

    @property
    def wrong(self) -> bool:
        """Whether the package has to be mended: it is broken or too old, or required and absent."""
        return self.state in ("broken", "too old") or (self.required and self.state == "absent")


def examine(requirements: Sequence[Requirement]) -> list[Package]:
    """Return the state of these packages, each imported once, in another process."""
    imported = probe([row.module for row in requirements if _module_exists(row.module)])
    return [_judge(row, _installed(row), imported.get(row.module)) for row in requirements]


def _installed(row: Requirement) -> str | None:
    for name in (row.versions.name, *row.other_names):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _module_exists(module: str) -> bool:
    """Whether the top-level module exists; an empty folder of that name (a namespace) does not
    count.
    """
    spec = find_spec(module.partition(".")[0])
    return spec is not None and spec.origin is not None


def _judge(row: Requirement, installed: str | None, imported: Import | None) -> Package:
    wanted = row.versions
    found = installed or (imported.version if imported else None)
    judged = Package(wanted.name, found, "usable", row.purpose, required=row.required)
    if imported is None and installed is None:
        return replace(judged, state="absent", imports=False, advice=wanted.install)
    if imported is None or imported.error is not None:
        again = f"pip install --force-reinstall {wanted.name}"
        reason = imported.error if imported else f"installed, but it holds no module {row.module}"
        return replace(judged, state="broken", imports=False, reason=reason, advice=again)
    if wanted.floor and found and release(found) < release(wanted.floor):
        because = f": releases before it {wanted.why}" if wanted.why else ""
        return replace(
            judged,
            state="too old",
            reason=f"needs {wanted.floor} or later{because}",
            advice=wanted.install,
        )
    return judged


def release(text: str) -> tuple[int, ...]:
    """Return the numbers of a version: (2, 13, 0) for "2.13.0+cpu"; none for what is no version.

    Without the package `packaging`, which may be missing.
    """
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def check_hopper(packages: dict[str, Package], capabilities: Sequence[str | None]) -> Package:
    """Return FLA's row; on Hopper as broken if the installed Triton compiles FLA's backward
    wrongly, so that FLA refuses to run it, and no other kernel takes its place.
    """
    fla, triton = packages["fla-core"], packages["triton"]
    setting = tilelang_off()
    helpers = [
        name for name, off in (("flash-qla", flash_qla_off()), ("tilelang", setting)) if off is None
    ]
    instead = has_nvcc() and any(packages[name].state == "usable" for name in helpers)
    since, until = map(release, FLA_BACKWARD_WRONG_ON_HOPPER)
    wrong_triton = triton.version is not None and since <= release(triton.version) < until
    if fla.state != "usable" or "9.0" not in capabilities or instead or not wrong_triton:
        return fla
    reason = (
        f"its backward raises on Hopper with triton {triton.version} without nvcc and tilelang or "
        "flash-qla"
    )
    if setting is None:
        return replace(fla, state="broken", reason=reason, advice=HOPPER_ADVICE)
    reason += f", and {setting} in the environment leaves tilelang out"
    return replace(
        fla,
        state="broken",
        reason=reason,
        advice=f"unset {setting.partition('=')[0]}, or {HOPPER_ADVICE}",
    )


def without_cuda(package: Package) -> Package:
    """Return a GPU package's row for a machine without CUDA: absent or unused, without advice."""
    if package.state == "absent":
        return replace(package, advice=None)
    more = f" ({package.reason})" if package.reason else ""
    return replace(package, state="unused", reason=f"no CUDA device{more}", advice=None)


@dataclass(frozen=True)
class Import:
    """The result of one import: the module's `__version__`, and the exception that the import
    raised.
    """

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


def probe(modules: Sequence[str], *, timeout: float = 300.0) -> dict[str, Import]:
    """Import each module once, in another process, so that a module that crashes or prints does no
    harm here.

    Args:
        modules: dotted names; modules after one that crashed are imported in a fresh process.
        timeout: seconds for all of them.
    """
    results: dict[str, Import] = {}
    while waiting := [module for module in modules if module not in results]:
        lines, end = _run_probe(waiting, timeout)
        results |= {name: Import(**result) for name, result in lines if result}
        started = [name for name, result in lines if not result]
        crashed = next((name for name in started if name not in results), None)
        # the interpreter itself does not start
        if crashed is None and waiting[0] not in results:
            crashed = waiting[0]
        if crashed is not None:
            results[crashed] = Import(None, end)
    return results


def _run_probe(modules: Sequence[str], timeout: float) -> tuple[list[Any], str]:
    paths = [str(Path(entry).absolute()) if entry else os.getcwd() for entry in sys.path]
    command = [sys.executable, "-c", _PROGRAM, json.dumps(paths), *modules]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        output, end = (
            done.stdout,
            f"importing it ends the interpreter ({_exit_of(done.returncode)})",
        )
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        end = f"importing it takes longer than {timeout:.0f} seconds"
    return [json.loads(line) for line in output.splitlines() if line.endswith("]")], end


def _exit_of(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"
