"""All findings of the doctor in one record."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import Any

from hf_packfree._version import __version__
from hf_packfree.doctor.machine import machine
from hf_packfree.doctor.packages import REQUIREMENTS, Package, check_hopper, examine, without_cuda
from hf_packfree.doctor.plans import Device, Plan, find_devices, find_plans
from hf_packfree.errors import in_short
from hf_packfree.versions import FLA_WITHOUT_CUDA_SINCE


@dataclass(frozen=True)
class Diagnosis:
    """Everything the doctor found.

    Attributes:
        packfree: this package's version.
        machine: {"OS", "Python", "GPU, driver", "nvcc", "torch's CUDA": what was found}.
        packages, devices, plans: see their classes.
        notes: sentences that do not belong to a single package.
    """

    packfree: str
    machine: dict[str, str]
    packages: tuple[Package, ...]
    devices: tuple[Device, ...]
    plans: tuple[Plan, ...]
    notes: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether no package is broken, too old, or required and absent."""
        return bool(self.plans) and not any(package.wrong for package in self.packages)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {**asdict(self), "healthy": self.healthy, "sentence": str(self)}

    def __str__(self) -> str:
        wrong = [f"{package.name} ({package.state})" for package in self.packages if package.wrong]
        if wrong:
            return f"To be mended: {', '.join(wrong)}."
        if not self.plans:
            return "Everything needed is installed, and what would run is not known."
        return (
            f"Everything needed is here: packed rows run {self._where()} on "
            f"{', '.join(d.name for d in self.devices)}."
        )

    def _where(self) -> str:
        """Say whether packed rows run on GPU kernels, and which operations do not."""
        from hf_packfree.ops.table import OPS

        runs = [pair for plan in self.plans for pair in plan.packed.items()]
        slow = {op for op, name in runs if name == "torch"}
        on_gpu = any(device.kind == "cuda" for device in self.devices)
        if not on_gpu or slow >= {op for op, _ in runs if OPS[op].leaks is not None}:
            return "in PyTorch eager"
        return (
            f"on GPU kernels ({', '.join(sorted(slow))} in PyTorch eager)"
            if slow
            else "on GPU kernels"
        )


def diagnose(model: str | None = None) -> Diagnosis:
    """Examine the packages and devices, and find out which backends would run.

    Args:
        model: a config or checkpoint folder, a hub id or a built-in name, or a folder of PEFT's
            adapters; plans are then for this model instead of the families. Only its config is
            read, not its weights, and its own code is not run.

    Raises:
        UnsupportedModel: no supported model has that name.
        PatchConflict, ContractError, BackendUnavailable: that model could not be patched.
    """
    packages = {package.name: package for package in examine(REQUIREMENTS)}
    found = machine()
    devices: tuple[Device, ...] = ()
    if packages["torch"].state == "usable":
        devices, found["torch's CUDA"], said = find_devices()
        packages["torch"] = _check_cuda(packages["torch"], devices, found, said)
    if any(device.kind == "cuda" for device in devices):
        packages["fla-core"] = check_hopper(packages, [device.capability for device in devices])
    else:
        for_gpus = [row.versions.name for row in REQUIREMENTS if row.cuda]
        packages |= {name: without_cuda(packages[name]) for name in for_gpus}
    plans, unplanned = _plans(model, packages)
    return Diagnosis(
        packfree=__version__,
        machine=found,
        packages=tuple(packages.values()),
        devices=devices,
        plans=plans,
        notes=(*unplanned, *_notes(packages, plans), *_reasons(plans)),
    )


def _check_cuda(
    torch: Package, devices: tuple[Device, ...], found: dict[str, str], said: str | None
) -> Package:
    """Return torch's row, as broken if the driver sees a GPU that torch does not."""
    seen = any(device.kind == "cuda" for device in devices)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    if seen or hidden or "driver " not in found["GPU, driver"]:
        return torch
    reason = said or "it sees no GPU (its CUDA: " + found["torch's CUDA"] + ")"
    advice = "install a torch whose CUDA this driver takes: pytorch.org/get-started"
    return replace(torch, state="broken", reason=f"there is a GPU, and {reason}", advice=advice)


def _plans(
    model: str | None, packages: dict[str, Package]
) -> tuple[tuple[Plan, ...], tuple[str, ...]]:
    """Return the plans, or a sentence about why there are none."""
    needed = [package for package in packages.values() if package.required and package.wrong]
    if needed:
        return (), (f"What would run is not known without {', '.join(p.name for p in needed)}.",)
    try:
        return find_plans(model, _unpacked(packages["fla-core"])), ()
    except Exception as error:
        # an error of a named model concerns the user; errors of families come from the installed
        # packages
        if model is not None:
            raise
        return (), (f"What would run is not known: {in_short(error)}.",)


def _unpacked(fla: Package) -> str:
    """Return what transformers runs for rows of one document: fla-core if it imports, whatever the
    devices are, else torch.
    """
    fails = ", which fails here" if fla.state in ("unused", "broken") else ""
    return f"transformers with fla-core{fails}" if fla.imports else "transformers"


def _notes(packages: dict[str, Package], plans: tuple[Plan, ...]) -> list[str]:
    notes, fla = [], packages["fla-core"]
    if fla.state == "unused" and fla.imports:
        notes.append(
            f"transformers {FLA_WITHOUT_CUDA_SINCE} and later calls fla-core for unpacked rows "
            "whether there is a CUDA device or not, and then fails: pip uninstall fla-core, or "
            "apply_patches(model, unpacked='native')."
        )
    with_images = any("images" in plan.media for plan in plans)
    if with_images and packages["torchvision"].state != "usable":
        notes.append(
            "Without torchvision the processors of models with images do not load, which TRL's "
            "trainers want for text, too: pip install torchvision, or pass a tokenizer as their "
            "processing_class."
        )
    return notes


def _reasons(plans: tuple[Plan, ...]) -> list[str]:
    """Return why faster backends would not run, each reason once; which adapters are not fused; and
    in which dtypes linear layers are fused.
    """
    if not plans:
        return []
    from hf_packfree.patching.called_projections import called_in_words

    found = {f"{op}: {reason}." for plan in plans for op, reason in plan.why.items()}
    called = [f"{called_in_words(plan.called)}." for plan in plans if plan.called]
    return sorted(found) + called + [f"{plan.linear}." for plan in plans if plan.linear]
