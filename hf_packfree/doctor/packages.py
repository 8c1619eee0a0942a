"""What is installed: usable, unused, absent, too old or broken, and why.

Nothing here needs torch, so the doctor can say what is wrong with torch itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal

from hf_packfree.doctor.probe import Probe, probe
from hf_packfree.doctor.requirements import Requirement
from hf_packfree.ops.toolkit import flash_qla_off, has_nvcc, tilelang_off
from hf_packfree.versions import FLA_BACKWARD_WRONG_ON_HOPPER, HOPPER_ADVICE

State = Literal["usable", "unused", "absent", "too old", "broken"]


@dataclass(frozen=True)
class Package:
    """What was found of one package.

    Attributes:
        version: installed, or None.
        state: what it comes to; `reason` says why, `advice` what to do about it.
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
        """Whether it has to be mended: broken or too old, or required and absent."""
        return self.state in ("broken", "too old") or (self.required and self.state == "absent")


def examine(requirements: Sequence[Requirement]) -> list[Package]:
    """Return what is installed of these, each imported once, in another process."""
    found = {row.name: _installed(row) for row in requirements}
    here = [row.module for row in requirements if module_exists(row.module)]
    imported = probe(here)
    return [_judge(row, found[row.name], imported) for row in requirements]


def _installed(row: Requirement) -> str | None:
    for name in (row.name, *row.other_names):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def module_exists(module: str) -> bool:
    """Whether the top-level module exists; an empty folder of that name (a namespace) does not count."""
    spec = find_spec(module.partition(".")[0])
    return spec is not None and spec.origin is not None


def _judge(row: Requirement, installed: str | None, imported: dict[str, Probe]) -> Package:
    result = imported.get(row.module)
    found = installed or (result.version if result else None)
    judged = Package(row.name, found, "usable", row.purpose, required=row.required)
    install = f"pip install '{row.name}>={row.floor}'" if row.floor else f"pip install {row.name}"
    if result is None and installed is None:
        return replace(judged, state="absent", imports=False, advice=install)
    if result is None or result.error is not None:
        again = f"pip install --force-reinstall {row.name}"
        reason = result.error if result else f"installed, but it holds no module {row.module}"
        return replace(judged, state="broken", imports=False, reason=reason, advice=again)
    if row.floor and found and release(found) < release(row.floor):
        because = f": {row.why}" if row.why else ""
        return replace(judged, state="too old", reason=f"needs {row.floor} or later{because}", advice=install)
    return judged


def release(text: str) -> tuple[int, ...]:
    """Return the numbers a version begins with: (2, 13, 0) for "2.13.0+cpu"."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def check_hopper(packages: dict[str, Package], capabilities: Sequence[str | None]) -> Package:
    """Return FLA's row; on Hopper, some releases of Triton compile its backward wrongly and FLA then refuses to run it."""
    fla, triton = packages["fla-core"], packages["triton"]
    setting = tilelang_off()
    helpers = [name for name, off in (("flash-qla", flash_qla_off()), ("tilelang", setting)) if off is None]
    instead = has_nvcc() and any(packages[name].state == "usable" for name in helpers)
    since, until = map(release, FLA_BACKWARD_WRONG_ON_HOPPER)
    wrong_triton = triton.version is not None and since <= release(triton.version) < until
    if fla.state != "usable" or "9.0" not in capabilities or instead or not wrong_triton:
        return fla
    return replace(
        fla,
        state="broken",
        reason=f"its backward raises on Hopper with triton {triton.version} without nvcc and tilelang or flash-qla"
        + (f", and {setting} in the environment leaves tilelang out" if setting else ""),
        advice=f"unset {setting.partition('=')[0]}, or {HOPPER_ADVICE}" if setting else HOPPER_ADVICE,
    )


def without_cuda(package: Package) -> Package:
    """Return the row of a package for GPUs as it is to be read on a machine without CUDA."""
    if package.state == "absent":
        return replace(package, advice=None)
    more = f" ({package.reason})" if package.reason else ""
    return replace(package, state="unused", reason=f"no CUDA device{more}", advice=None)
