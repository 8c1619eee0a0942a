"""All findings together."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

from hf_packfree._version import __version__
from hf_packfree.doctor.packages import Package, check_hopper, examine, without_cuda
from hf_packfree.doctor.plans import Device, Plan, find_devices, find_plans
from hf_packfree.doctor.requirements import REQUIREMENTS


@dataclass(frozen=True)
class Diagnosis:
    """Everything the doctor found.

    Attributes:
        packfree, python: versions.
        packages, devices, plans: see their classes.
        notes: sentences that belong to no package alone.
    """

    packfree: str
    python: str
    packages: tuple[Package, ...]
    devices: tuple[Device, ...]
    plans: tuple[Plan, ...]
    notes: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing has to be mended."""
        return not any(package.wrong for package in self.packages)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {**asdict(self), "healthy": self.healthy, "sentence": str(self)}

    def __str__(self) -> str:
        wrong = [f"{package.name} ({package.state})" for package in self.packages if package.wrong]
        if wrong:
            return f"To be mended: {', '.join(wrong)}."
        return f"Everything needed is here: packed rows run {self._where()} on {', '.join(d.name for d in self.devices)}."

    def _where(self) -> str:
        """Say whether packed rows run on GPU kernels, and what of them does not."""
        slow = {op for plan in self.plans for op, name in plan.packed.items() if name == "torch"}
        if not any(device.kind == "cuda" for device in self.devices) or slow >= {"delta_rule", "conv", "attention"}:
            return "in plain torch"
        return f"on GPU kernels ({', '.join(sorted(slow))} in plain torch)" if slow else "on GPU kernels"


def diagnose(model: str | None = None) -> Diagnosis:
    """Look at the packages, the devices and what would run.

    Args:
        model: a config or checkpoint folder, a hub id or a built-in name; plans are then for it instead of the families.
            Its config is read and its weights are not; code of its own is not run.

    Raises:
        UnsupportedModel: no supported model has that name.
        PatchConflict, ContractError, BackendUnavailable: that model could not be patched.
    """
    packages = {row.name: row for row in examine(REQUIREMENTS)}
    devices = find_devices() if packages["torch"].state == "usable" else ()
    if any(device.kind == "cuda" for device in devices):
        packages["fla-core"] = check_hopper(packages, [device.capability for device in devices])
    else:
        packages |= {row.name: without_cuda(packages[row.name]) for row in REQUIREMENTS if row.cuda}
    can_build = all(packages[name].state == "usable" for name in ("torch", "transformers"))
    plans = find_plans(model, _unpacked(packages["fla-core"])) if can_build else ()
    return Diagnosis(
        packfree=__version__,
        python=platform.python_version(),
        packages=tuple(packages.values()),
        devices=devices,
        plans=plans,
        notes=(*_notes(packages["fla-core"]), *_reasons(plans)),
    )


def _unpacked(fla: Package) -> str:
    """What upstream takes for rows of one document: it looks at what imports, not at devices."""
    fails = ", which fails here" if fla.state in ("unused", "broken") else ""
    return f"upstream, fla-core{fails}" if fla.imports else "upstream, torch"


def _notes(fla: Package) -> list[str]:
    notes = []
    if fla.state == "unused" and fla.imports:
        notes.append(
            "transformers 5.15 and later calls fla-core for unpacked rows without asking for a CUDA device, and then fails: "
            "pip uninstall fla-core, or apply_patches(model, unpacked='native')."
        )
    return notes


def _reasons(plans: tuple[Plan, ...]) -> list[str]:
    """Why a faster backend would not run, each said once."""
    found = {f"{op}: {reason}." for plan in plans for op, reason in plan.why.items()}
    return sorted(found)
