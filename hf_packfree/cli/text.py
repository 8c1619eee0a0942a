"""Sentences, aligned columns and JSON by the standard library alone, also for where rich is
missing.

Answers go to stdout, errors to stderr.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, TextIO

COLOURS = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "cyan": 36}
"""{name: its number in a terminal}."""


def width(stream: TextIO | None = None) -> int | None:
    """Return the width of a line in columns: COLUMNS, or the terminal's. None for a pipe or a file,
    in which sentences stay on one line.
    """
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return shutil.get_terminal_size().columns if (stream or sys.stdout).isatty() else None


def wrapped(text: str, indent: str = "", stream: TextIO | None = None) -> str:
    """Break text between words, never inside one; lines after the first begin with `indent`."""
    columns = width(stream)
    if columns is None:
        return text
    lines = textwrap.wrap(
        text,
        columns,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)


def painted(text: str, colour: str, stream: TextIO | None = None) -> str:
    """Return the text in a colour, if the stream is a terminal that shows colours."""
    stream = stream or sys.stdout
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb" or not stream.isatty()
    return text if plain else f"\033[{COLOURS[colour]}m{text}\033[0m"


def say(sentence: str, colour: str | None = None) -> None:
    """Write a sentence to stdout."""
    for line in sentence.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        text = wrapped(line, indent)
        print(text if colour is None else painted(text, colour))


def verdict(word: str, colour: str, sentence: str) -> None:
    """Write the last line of an answer: the verdict in one word, and a sentence."""
    text = wrapped(f"{word}: {sentence}")
    print(painted(word, colour) + text.removeprefix(word))


def complain(error: object) -> None:
    """Write an error to stderr, as a sentence."""
    text = wrapped(f"packfree: {' '.join(str(error).split())}", stream=sys.stderr)
    print(painted(text, "red", sys.stderr), file=sys.stderr)


def as_json(data: Any) -> None:
    """Write data as JSON; NaN and infinity, which JSON lacks, become null."""
    finite = json.loads(json.dumps(data), parse_constant=lambda name: None)
    sys.stdout.write(json.dumps(finite, indent=2) + "\n")


def section(title: str, rows: Sequence[Sequence[str]], colours: Sequence[str] = ()) -> None:
    """Write rows of cells as aligned columns below a title; the last column is wrapped.

    Args:
        title: written in bold.
        rows: cells, the same number in each.
        colours: the colour of each row's last but one cell, if given.
    """
    print(painted(wrapped(title, "  "), "bold"))
    widths = [max(map(len, column)) for column in list(zip(*rows))[:-1]]
    if width() is None:
        # columns are at most 40 wide: a longer cell moves only its own line to the right
        widths = [min(columns, 40) for columns in widths]
    for place, (*cells, last) in enumerate(rows):
        padded = [cell.ljust(columns) for cell, columns in zip(cells, widths)]
        indent = " " * (sum(widths) + 2 * len(widths) + 2)
        if (columns := width()) is not None and len(indent) > columns - 24:
            # too narrow for the last cell: it goes below the others
            indent = "      "
        lines = wrapped("  " + "  ".join([*padded, last]), indent).split("\n")
        if colours:
            mark = padded[-1].rstrip()
            lines[0] = lines[0].replace(mark, painted(mark, colours[place]), 1)
        print("\n".join(line.rstrip() for line in lines))
