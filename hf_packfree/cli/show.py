"""Tables, bars and sentences. Answers go to stdout; errors, spinners and bars to stderr, where
libraries are kept quiet.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from hf_packfree.bench import BenchReport
    from hf_packfree.demo import DemoReport
    from hf_packfree.doctor import Diagnosis, Plan, Supported
    from hf_packfree.verify import PackingReport

COLOURS = {
    "usable": "green",
    "unused": "cyan",
    "absent": "dim",
    "too old": "yellow",
    "broken": "red",
}
CHATTER = {
    # packfree doctor says what is installed
    "transformers.integrations.hub_kernels": ("reference PyTorch implementation",),
    # the error that follows says it once
    "huggingface_hub.utils._http": ("thrown while requesting", "Retrying in"),
}
"""{logger: parts of the messages that are left out}."""


class Console(RichConsole):
    """Rich's; a pipe that its reader closed is an error for `main`, and a width of 0 (COLUMNS=0)
    is as if there were none.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.width < 1:
            self.width = shutil.get_terminal_size().columns

    def on_broken_pipe(self) -> None:
        """Raise, where Rich ends the process by the exit code of a leak."""
        raise BrokenPipeError


def say(sentence: str) -> None:
    """Write a sentence to stdout, unbroken."""
    Console(soft_wrap=True, highlight=False, markup=False).print(sentence)


def complain(error: object) -> None:
    """Write what went wrong to stderr, on one line."""
    text = " ".join(str(error).split())
    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(
        f"packfree: {text}", style="red"
    )


def as_json(data: Any) -> None:
    """Write data as JSON; NaN and infinity, which JSON lacks, become null."""
    finite = json.loads(json.dumps(data), parse_constant=lambda name: None)
    sys.stdout.write(json.dumps(finite, indent=2) + "\n")


def spinner(text: str, silent: bool) -> AbstractContextManager[Any]:
    """Turn a spinner on stderr during the block."""
    return nullcontext() if silent else Console(stderr=True).status(escape(text))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def diagnosis(found: Diagnosis) -> None:
    """Show the doctor's findings."""
    console = Console()
    packages = _table(
        f"hf_packfree {found.packfree}, Python {found.python}",
        "package",
        "version",
        "state",
        "what to know",
    )
    for row in found.packages:
        known = "; ".join(filter(None, [row.reason or row.purpose, row.advice]))
        packages.add_row(
            row.name, row.version or "", f"[{COLOURS[row.state]}]{row.state}[/]", escape(known)
        )
    console.print(packages)
    if found.plans:
        console.print(_plans(found.plans))
    for device in found.devices:
        memory = f", {device.memory_gib} GiB" if device.memory_gib else ""
        capability = f", capability {device.capability}" if device.capability else ""
        say(f"Device {device.kind}: {device.name}{memory}{capability}")
    for sentence in (*found.notes, str(found)):
        say(sentence)


def _plans(plans: Sequence[Plan]) -> Table:
    """Return a row for each model: by which backends its operations run."""
    columns = (
        "model",
        "operations of packed rows",
        "unpacked rows",
        "packed rows of",
        "rows shared by ranks",
    )
    table = _table("What would run", *columns)
    for plan in plans:
        backends: dict[str, list[str]] = {}
        for op, name in plan.packed.items():
            backends.setdefault(name, []).append(op.replace("_", " "))
        runs = "; ".join(f"{name}: {', '.join(ops)}" for name, ops in backends.items())
        table.add_row(escape(plan.name), runs, plan.unpacked, ", ".join(plan.media), plan.shared)
    return table


def packing(report: PackingReport) -> None:
    """Show what verification measured."""
    title = f"{report.model}, {report.dtype}, {report.device}"
    table = _table(title, "relative RMS error", "patched", "unpatched", "allowed")
    limits = report.limits
    rows = [
        ("logits", "logits", limits.logits),
        ("gradients, worst parameter", "gradients", limits.gradients),
        ("influence of other documents", "influence", limits.influence),
        ("gradient across documents, largest absolute", "cross_gradient", 0.0),
    ]
    for name, field, limit in rows:
        values = [getattr(measured, field, None) for measured in (report.patched, report.unpatched)]
        table.add_row(
            name,
            *("-" if value is None else f"{value:.1e}" for value in values),
            f"{limit:.0e}" if limit else "0",
        )
    Console().print(table)
    say(
        f"One row of documents of {', '.join(map(str, report.lengths))} tokens, against a forward "
        f"of each document alone."
    )
    say(sentence_of(report))


def sentence_of(report: PackingReport) -> str:
    """Return the verdict."""
    failures = report.failures()
    if failures:
        return f"{report.model} leaks between packed documents: {'; '.join(failures)}."
    return f"{report}."


def supported(rows: Sequence[Supported]) -> None:
    """Show the supported families and the classes that are swapped in them."""
    table = _table("Supported model families", "family", "class that is swapped", "because")
    for row in rows:
        for place, (name, why) in enumerate(row.swaps.items()):
            table.add_row("" if place else row.name, name, why)
        table.add_section()
    Console().print(table)
    for row in rows:
        say(
            f"{row.name}: transformers {row.transformers}; rows of {', '.join(row.media)}; heads: "
            f"{', '.join(row.heads)}."
        )
    say(
        f"{len(rows)} families are supported: the bare text models and all of these heads, by "
        f"apply_patches(model)."
    )


@contextmanager
def bars(silent: bool = False) -> Iterator[Callable[..., None]]:
    """Show a bar per stage during the block, and hand out `move(stage, done, total, note)`,
    which moves them.
    """
    name, note = TextColumn("{task.description:<24}"), TextColumn("{task.fields[note]}")
    columns = (name, BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(), note)
    with Progress(*columns, console=Console(stderr=True), disable=silent) as progress:
        tasks: dict[str, Any] = {}

        def move(stage: str, done: int, total: int, note: str = "") -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, note="")
            progress.update(tasks[stage], completed=done, total=total, note=note, refresh=True)

        yield move


def bench(report: BenchReport, picture: object = None) -> None:
    """Show what a benchmark measured."""
    lengths = report.options.lengths
    table = _table(
        f"{report.model}, {report.parameters:,} parameters, {report.dtype}, {report.device}",
        "step",
        "tokens",
        "ms",
        "faster",
        "tokens/s",
        "MiB",
        "memory",
        "floor",
    )
    for row in report.candidates:
        if row.median is None:
            table.add_row(row.name, f"{row.computed_tokens:,}", "did not run", "", "", "", "", "")
            continue
        numbers = [
            (report.faster(row.name), ".2f"),
            (report.tokens_per_second(row.name), ",.0f"),
            (row.peak_mib, ",.0f"),
            (report.memory_share(row.name), ".0%"),
            (report.floor_share(row.name), ".0%"),
        ]
        cells = ["-" if value is None else f"{value:{form}}" for value, form in numbers]
        table.add_row(row.name, f"{row.computed_tokens:,}", f"{row.median * 1e3:,.1f}", *cells)
    Console().print(table)
    say(
        f"Forward and backward of {len(lengths)} documents of {min(lengths):,} to {max(lengths):,} "
        f"tokens; medians of {report.options.rounds} steps, all candidates in turns.  Tokens/s "
        f"count real tokens, {report.real_tokens:,} a step."
    )
    if report.images:
        say(f"Images: {report.images}, of {report.patches:,} patches.")
    if report.options.origin:
        say(f"Lengths: {report.options.origin}.")
    say(
        f"Faster, memory: relative to unpatched padded.  MiB: the peak of one step; "
        f"{report.memory}."
    )
    towers = ", towers left out" if report.images else ""
    say(
        "Floor: the share of a step that the matrix products of its linear layers and "
        f"experts{towers} take by themselves, {report.floor * 1e3:,.1f} ms."
    )
    for row in report.candidates:
        if row.refused or row.note:
            say(f"{row.name}: {'did not run: ' + row.refused if row.refused else row.note}.")
    ran = ", ".join(f"{op}: {name}" for op, name in report.implementations.items())
    versions = ", ".join(
        f"{name} {version}" for name, version in report.versions.items() if version
    )
    say(f"Patched rows ran {ran}; {versions}.")
    if picture is not None:
        say(f"Drawn into {picture}.")
    say(f"{report}.")


def demo(report: DemoReport) -> None:
    """Show what the demo measured."""
    padded, lengths, found = report.padded, report.lengths, report.verification
    documents = f"{len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens"
    table = _table(
        f"{documents}, {report.parameters:,} parameters, {report.device}",
        "training",
        "last loss",
        "off by",
        "real tokens",
        "tokens/s",
        "peak MiB",
    )
    for row in report.trainings:
        off = "" if row is padded else f"{row.difference(padded):.1e}"
        numbers = (f"{row.real_share:.0%}", f"{row.tokens_per_second:,.0f}", f"{row.peak_mib:,.0f}")
        table.add_row(row.name, f"{row.losses[-1]:.6f}", off, *numbers)
    Console().print(table)
    unpatched = (
        ""
        if found.unpatched is None
        else f"{found.unpatched.logits:.1e} in the unpatched model and by "
    )
    say(
        f"A packed document's logits are off by {unpatched}{found.patched.logits:.1e} in the "
        f"patched one."
    )
    say(
        "Off by: the largest relative loss difference to the padded training.  Tokens/s count real "
        "tokens, without the first "
        "step.  Peak MiB: the most memory that one training step allocates."
    )
    say(
        f"Written to {report.options.out}: {', '.join(report.files)} ({report.seconds:.0f} s in "
        f"all)."
    )
    say(str(report))


def _keep(record: logging.LogRecord) -> bool:
    return not any(words in record.getMessage() for words in CHATTER[record.name])


@contextmanager
def quiet_libraries(*, bars: bool = True) -> Iterator[None]:
    """Hide, for the block, messages and loading bars that would be written over a table and warn of
    no harm.

    Args:
        bars: hide transformers' loading bars too; without, it is not imported.
    """
    library: Any = None
    if bars:
        from transformers.utils import logging as library
    restore = bars and library.is_progress_bar_enabled()
    for name in CHATTER:
        logging.getLogger(name).addFilter(_keep)
    if restore:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for name in CHATTER:
            logging.getLogger(name).removeFilter(_keep)
        if restore:
            library.enable_progress_bar()
