"""The doctor's findings as text to paste into an issue; needs no other package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_packfree.cli.text import say, section

if TYPE_CHECKING:
    from hf_packfree.doctor import Diagnosis, Plan
    from hf_packfree.doctor.families import Served
    from hf_packfree.doctor.plans import Supported

COLOURS = {
    "usable": "green",
    "unused": "cyan",
    "absent": "dim",
    "too old": "yellow",
    "broken": "red",
}


def diagnosis(found: Diagnosis) -> None:
    """Show the doctor's findings."""
    machine = [(name, text) for name, text in found.machine.items()]
    machine += [(f"device {device.kind}", _device(device)) for device in found.devices]
    section(f"hf_packfree {found.packfree}", machine)
    packages = [
        (row.name, row.version or "", row.state, "; ".join(filter(None, _known(row))))
        for row in found.packages
    ]
    section("Packages", packages, [COLOURS[row.state] for row in found.packages])
    if found.plans:
        same: dict[str, list[str]] = {}
        for plan in found.plans:
            same.setdefault(_runs(plan, len(found.plans) == 1), []).append(plan.name)
        section("What would run", [(", ".join(names), text) for text, names in same.items()])
    for sentence in found.notes:
        say(sentence)
    say(str(found), "green" if found.healthy else "red")


def _device(device: Any) -> str:
    memory = f", {device.memory_gib} GiB" if device.memory_gib else ""
    capability = f", capability {device.capability}" if device.capability else ""
    return f"{device.name}{memory}{capability}"


def _known(row: Any) -> Sequence[str | None]:
    return row.reason or row.purpose, row.advice


def _runs(plan: Plan, of_one_model: bool) -> str:
    """Return in words which backends run a model's operations; of one model also what ranks that
    share a row exchange, which takes a sentence by itself.
    """
    backends: dict[str, list[str]] = {}
    for op, name in plan.packed.items():
        backends.setdefault(name, []).append(op.replace("_", " "))
    packed = "; ".join(f"{name}: {', '.join(ops)}" for name, ops in backends.items())
    said = f"packed rows of {', '.join(plan.media)} by {packed}; unpacked rows by {plan.unpacked}"
    return f"{said}; ranks of context parallelism {plan.shared}" if of_one_model else said


def served(rows: Sequence[Served]) -> None:
    """Show one row per family: its checkpoints, and how to load them."""
    cells = [("built-in name", "rows of", "transformers", "Auto class, checkpoints")]
    cells += [
        (row.name, ", ".join(row.media), row.transformers, f"{row.auto_class}: {row.checkpoints}")
        for row in rows
    ]
    section(f"{len(rows)} families are supported", cells)
    say(
        "Their bases, fine-tunes and quantised forms count too. packfree verify NAME measures a "
        "tiny random model of a family, packfree verify CHECKPOINT yours; packfree models "
        "--verbose names the classes that are swapped."
    )


def refused(reasons: Mapping[str, Sequence[str]]) -> None:
    """Show which families are refused, and why."""
    say(
        "Other families of plain attention are patched if a tiny copy of the model, measured on "
        "the spot, is exact. These are refused, whatever is measured:"
    )
    for reason, names in reasons.items():
        say(f"  {', '.join(names)}: {reason}")


def swapped(rows: Sequence[Supported]) -> None:
    """Show the classes that are swapped in each family, and why."""
    for row in rows:
        title = f"{row.name}: transformers {row.transformers}; heads {', '.join(row.heads)}"
        section(title, list(row.swaps.items()))
