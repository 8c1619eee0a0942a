"""Write docs/refused.md from the errors in the code: what was found, what is wanted, what to do;
and into docs/compatibility.md which families are refused, and why.

python -m tests.refused             print the tables
python -m tests.refused --write     put them into both pages
python -m tests.refused --check     say whether the pages have them; exit code 1 if not
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import hf_packfree
from hf_packfree import errors
from hf_packfree.refused_families import by_reason
from tests.source import nodes

HOUSE = Path(hf_packfree.__file__).parent
PAGE = Path(__file__).parents[1] / "docs/refused.md"
FAMILIES_PAGE = PAGE.with_name("compatibility.md")
MARK = "<!-- refused -->"
BUILTIN = ("ValueError", "TypeError", "RuntimeError")
SECTIONS = {
    "Boundaries, positions and masks": (
        "Two readings of one batch are two different models, and upstream ignores what it does not "
        "know. None is guessed.",
        ("packing/",),
    ),
    "Images, videos and audio": (
        "A patch that reaches another document's tokens trains the wrong pair, and nothing in the "
        "loss says so.",
        (
            "packing/media.py",
            "packing/mrope_rows.py",
            "models/audio",
            "models/absent_media.py",
            "models/rope_index.py",
            "models/placeholders.py",
            "models/qwen",
            "models/sharded_media.py",
            "models/vision",
        ),
    ),
    "The call of a model": (
        "What one document may have, and several in a row cannot: a cache, attention weights, a "
        "look ahead.",
        ("models/", "graphs/"),
    ),
    "Models, and what is around them": (
        "What mixes tokens without knowing of documents leaks, and a swap that cannot be undone "
        "is none.",
        (
            "patching/",
            "models/run_options.py",
            "models/rotary.py",
            "models/row_adapters.py",
            "models/state.py",
        ),
    ),
    "Kernels": (
        "A backend that was asked for runs, or says why it cannot; it is never replaced in "
        "silence.",
        ("ops/", "once_differentiable.py"),
    ),
    "Multi-token prediction": (
        "A head without its checkpoint's tensors would be trained from noise, or lost when saved.",
        ("mtp/", "patching/mtp_head.py"),
    ),
    "Context parallelism": (
        "Ranks that disagree wait for each other for ever, or train on a mixture.",
        ("parallel/", "models/context_parallel.py"),
    ),
    "Collators and packs": ("No document is lost, cut or repeated unasked.", ("data/",)),
    "Training and verification": (
        "A measurement that can show nothing is no proof.",
        ("trainer", "verify/"),
    ),
    "Command line": (
        "One sentence and an exit code in place of a traceback.",
        ("bench/", "cli/", "demo/", "doctor/"),
    ),
}
"""{title: (why, how the paths of its files begin)}; the longest such beginning decides."""


@dataclass(frozen=True)
class Refusal:
    """One error of the code: where it is, its class, and its sentence in three parts."""

    file: str
    error: str
    found: str
    wanted: str
    mend: str

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """A row of the page."""
        return f"`{self.error}`", self.found, self.wanted, self.mend


@cache
def refusals() -> list[Refusal]:
    """Return every error with a sentence of its own, in the order of the files."""
    found = []
    for file in sorted(HOUSE.rglob("*.py")):
        name = file.relative_to(HOUSE).as_posix()
        found += list(dict.fromkeys(_in_file(name, file.read_text())))
    return found


def _in_file(name: str, source: str) -> Iterator[Refusal]:
    values = _constants(source)
    calls = [node for node in nodes(source) if isinstance(node, ast.Call)]
    for node in sorted(calls, key=lambda call: call.lineno):
        kind = getattr(node.func, "id", "")
        if not node.args or (kind not in BUILTIN and not hasattr(errors, kind)):
            continue
        text = _text(node.args[0], values).replace("|", "\\|")
        if text.startswith("found ") and "; wanted " in text:
            what, _, rest = text.removeprefix("found ").partition("; wanted ")
            wanted, _, mend = rest.partition("; ")
            yield Refusal(name, kind, what, wanted, mend)


def _text(node: ast.expr, values: dict[str, Any]) -> str:
    """Return a message as people read it: the values of the file's constants, and names in italics
    for what a call decides.
    """
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, values) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        if isinstance(node.value, ast.Name) and node.value.id in values:
            value = values[node.value.id]
            spec = "" if node.format_spec is None else _text(node.format_spec, values)
            said = format(repr(value) if node.conversion == ord("r") else value, spec)
            return re.sub(r"([\\*])", r"\\\1", said)
        return _text(node.value, values)
    if isinstance(node, ast.Name):
        return f"*{node.id.replace('_', ' ').strip()}*"
    return "…"


def _constants(source: str) -> dict[str, Any]:
    """Return the texts and numbers that a file calls by a name in capitals, its own and those that
    it imports from the package; not what depends on the machine.
    """
    found: dict[str, Any] = {}
    for node in nodes(source):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_packfree."):
            path = HOUSE.parent / f"{(node.module or '').replace('.', '/')}.py"
            theirs = _own_constants(path.read_text()) if path.is_file() else {}
            found |= {a.asname or a.name: theirs[a.name] for a in node.names if a.name in theirs}
    return found | _own_constants(source)


@cache
def _own_constants(source: str) -> dict[str, Any]:
    assigned = (
        (node.targets[0] if isinstance(node, ast.Assign) else node.target, node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
    )
    named = {
        name.id: _value(value)
        for name, value in assigned
        if isinstance(name, ast.Name) and name.id.isupper()
    }
    return {name: value for name, value in named.items() if value is not None}


def _value(node: ast.expr) -> str | int | float | None:
    """Return a text or a number, or what is computed of numbers alone; None for anything else."""
    arithmetic = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
    if not all(isinstance(part, arithmetic) for part in ast.walk(node)):
        return None
    value = eval(compile(ast.Expression(node), "constant", "eval"))
    return value if isinstance(value, str | int | float) else None


def section_of(file: str) -> str | None:
    """Return the title of the section that a file of the package belongs to."""
    fits = [
        (len(start), title)
        for title, (_, starts) in SECTIONS.items()
        for start in starts
        if file.startswith(start)
    ]
    return max(fits)[1] if fits else None


def tables() -> str:
    """Return all sections."""
    lines = []
    for title, (why, _) in SECTIONS.items():
        rows = [each.cells for each in refusals() if section_of(each.file) == title]
        if rows:
            lines += [f"## {title}", "", why, "", "| error | found | wanted | what to do |"]
            lines += ["|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows), ""]
    return "\n".join(lines)


def page() -> str:
    """Return the page with the tables of today."""
    head = PAGE.read_text().partition(MARK)[0]
    return f"{head}{MARK}\n\n{tables()}"


def families_page() -> str:
    """Return the page of families with those that are refused today between its marks."""
    head, _, tail = FAMILIES_PAGE.read_text().split(MARK)
    rows = (
        f"| {', '.join(f'`{name}`' for name in names)} | {reason} |"
        for reason, names in by_reason().items()
    )
    table = "\n".join(("| refused | because |", "|---|---|", *rows))
    return f"{head}{MARK}\n{table}\n{MARK}{tail}"


def main(arguments: list[str] | None = None) -> int:
    """Print, write or check; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the tables into the page")
    parser.add_argument("--check", action="store_true", help="compare the page with the code")
    chosen = parser.parse_args(arguments)
    if chosen.write:
        PAGE.write_text(page())
        FAMILIES_PAGE.write_text(families_page())
    elif chosen.check:
        for found, wanted in ((PAGE, page()), (FAMILIES_PAGE, families_page())):
            if found.read_text() != wanted:
                print(
                    f"docs/{found.name} is not what the code says: python -m tests.refused --write"
                )
                return 1
    else:
        print(tables())
    return 0


if __name__ == "__main__":
    sys.exit(main())
