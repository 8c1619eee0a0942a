"""Results of the commands as tables and sentences, by rich; and rich's bars and spinners, on
stderr.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hf_packfree.cli.text import say, verdict

if TYPE_CHECKING:
    from hf_packfree.bench import BenchReport, TreeReport
    from hf_packfree.demo import DemoReport
    from hf_packfree.verify import PackingReport


class Console(RichConsole):
    """Rich's console, except that `main` handles a pipe that its reader closed, and that a width of
    0 (COLUMNS=0) is ignored.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.width < 1:
            self.width = shutil.get_terminal_size().columns

    def on_broken_pipe(self) -> None:
        """Raise: Rich would exit with 1, the code of a leak."""
        raise BrokenPipeError


def spinner(text: str, silent: bool) -> AbstractContextManager[Any]:
    """Return a context that shows a spinner on stderr."""
    return nullcontext() if silent else Console(stderr=True).status(escape(text))


def _table(title: str, first: str, *numbers: str) -> Table:
    """Return a table with a first column of words, which are wrapped, and columns of numbers, which
    are not.
    """
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    table.add_column(first)
    for column in numbers:
        table.add_column(column, no_wrap=True)
    return table


def _print(table: Table) -> None:
    """Write a table, wider than the terminal if its columns need that: rich would truncate them,
    and a truncated number is a wrong one.
    """
    console = Console()
    needed = Measurement.get(console, console.options.update_width(1000), table).minimum
    console.width = max(console.width, needed)
    console.print(table)


def packing(report: PackingReport) -> None:
    """Show the results of a verification."""
    title = f"{report.model}, {report.dtype}, {report.device}"
    table = _table(title, "relative RMS error", "unpatched", "patched", "allowed")
    limits = report.limits
    rows = [
        ("logits", "logits", limits.logits),
        ("gradients, worst parameter", "gradients", limits.gradients),
        ("influence of other documents", "influence", limits.influence),
        ("gradient across documents, largest absolute", "cross_gradient", 0.0),
    ]
    both: tuple[Any, Any] = (report.unpatched, report.patched)
    if report.not_patched is not None:
        both = (report.patched, None)
    for name, field, limit in rows:
        values = [getattr(measured, field, None) for measured in both]
        table.add_row(
            name,
            *("-" if value is None else f"{value:.1e}" for value in values),
            f"{limit:.0e}" if limit else "0",
        )
    _print(table)
    say(
        f"One row of {report.what.split()[-1]} of {', '.join(map(str, report.lengths))} tokens"
        f"{', which share a prefix' if report.tree else ''}, against a forward of each alone."
    )
    judged(report)


def judged(report: PackingReport) -> None:
    """Show the verdict."""
    word, colour = ("LEAK", "red") if report.failures() else ("exact", "green")
    verdict(word, colour, sentence_of(report))


def sentence_of(report: PackingReport) -> str:
    """Return the verdict in a sentence."""
    failures = report.failures()
    if failures:
        return f"{report.model} leaks between packed documents: {'; '.join(failures)}{report.why}."
    return f"{report}."


@contextmanager
def bars(silent: bool) -> Iterator[Callable[..., None]]:
    """Show a bar per stage during the block, or now and then a line if stderr is no terminal;
    yields `move(stage, done, total, note)`, which moves the bars.
    """
    name, note = TextColumn("{task.description:<24}"), TextColumn("{task.fields[note]}")
    columns = (name, BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(), note)
    console = Console(stderr=True)
    if silent or not console.is_terminal:
        yield _lines(silent)
        return
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, Any] = {}

        def move(stage: str, done: int, total: int, note: str = "") -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, note="")
            progress.update(tasks[stage], completed=done, total=total, note=note, refresh=True)

        yield move


def _lines(silent: bool) -> Callable[..., None]:
    """Return a `move` that writes a line where a stage begins, every 10 seconds, and where it
    ends.
    """
    stages, times = [""], [0.0]

    def move(stage: str, done: int, total: int, note: str = "") -> None:
        now = time.monotonic()
        due = stage != stages[-1] or done == total or now - times[-1] >= 10.0
        if not silent and due:
            stages.append(stage)
            times.append(now)
            print(f"{stage}: {done} of {total}{f', {note}' if note else ''}", file=sys.stderr)

    return move


def bench(report: BenchReport, picture: object = None) -> None:
    """Show the results of a benchmark."""
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
    _print(table)
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
        "Faster, memory: relative to unpatched padded.  MiB: the peak of one step; "
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
    _ran(report)
    if picture is not None:
        say(f"Drawn into {picture}.")
    say(f"{report}.")


def _ran(report: BenchReport | TreeReport) -> None:
    ran = ", ".join(f"{op}: {name}" for op, name in report.implementations.items())
    versions = ", ".join(
        f"{name} {version}" for name, version in report.versions.items() if version
    )
    say(f"Patched rows ran {ran}; {versions}.")


def tree_bench(report: TreeReport) -> None:
    """Show the results of a benchmark of shared prefixes."""
    table = _table(
        f"{report.model}, {report.parameters:,} parameters, {report.dtype}, {report.device}",
        "samples in a row",
        "tokens",
        "ms",
        "faster",
        "MiB",
        "memory",
    )
    whole = report.candidates[0].computed_tokens
    for row in report.candidates:
        if row.median is None or row.peak_mib is None:
            table.add_row(row.name, f"{row.computed_tokens:,}", "did not run", "", "", "")
            continue
        shared = row is report.candidates[1]
        table.add_row(
            row.name,
            f"{row.computed_tokens:,}",
            f"{row.median * 1e3:,.1f}",
            f"{(report.faster or 0) if shared else 1:.2f}" if report.complete else "-",
            f"{row.peak_mib:,.0f}",
            f"{(report.memory_share or 0) if shared else 1:.0%}" if report.complete else "-",
        )
    _print(table)
    say(
        f"Forward and backward of {report.samples} samples, {whole:,} tokens together; medians of "
        f"{report.options.rounds} steps, in turns.  Packed: one after the other in a row; tree: "
        "what they share is there once."
    )
    say(f"MiB: the peak of one step; {report.memory}.")
    for row in report.candidates:
        if row.refused:
            say(f"{row.name}: did not run: {row.refused}.")
    if report.difference is not None:
        say(f"Both losses are the same: they differ by {report.difference:.0e} of themselves.")
    _ran(report)
    say(f"{report}.")


def demo(report: DemoReport) -> None:
    """Show the results of the demo."""
    padded, lengths = report.padded, report.lengths
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
    _print(table)
    say(
        "Off by: the largest relative loss difference to the padded training.  Tokens/s count real "
        "tokens, without the first "
        "step.  Peak MiB: the most memory that one training step allocates, and what CUDA graphs "
        "keep."
    )
    texts = report.continuations
    say(f"The trained model continues {texts.prompt!r}:")
    for who, given in (
        ("alone", (texts.alone,)),
        ("without patches", texts.unpatched),
        ("patched", texts.patched),
    ):
        say(f"  {who}: {' or '.join(map(repr, dict.fromkeys(given)))}")
    say(report.harm())
    say(
        f"Written to {report.options.out}: {', '.join(report.files)} ({report.seconds:.0f} s in "
        "all)."
    )
    say(
        "Next: packfree verify MY_CHECKPOINT checks yours, packfree bench MY_CHECKPOINT --lengths "
        "MY.jsonl says what you would gain, and docs/quickstart.md trains it."
    )
    say(str(report), "red" if report.failures() else "green")
