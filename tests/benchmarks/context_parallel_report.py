"""The tables of docs/parallel.md: steps of rows that two GPUs share beside one GPU's, FSDP2, the
Trainer, gradients, curves.

python -m tests.benchmarks.context_parallel_report            # print
python -m tests.benchmarks.context_parallel_report --write    # into the page
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.benchmarks import report
from tests.benchmarks.timing import read_lines

PAGE, MARK = "docs/parallel.md", "two-gpus"
FOLDER = report.RESULTS / "parallel"
KINDS = {
    "lora": "LoRA",
    "mtp": "multi-token prediction head",
    "vl": "vision-language model",
}
HEAD = {
    "one GPU": "",
    'two, `gdn="state"`': "state",
    'two, `gdn="heads"`': "heads",
    "two, FLA's own exchange": "fla",
}
"""{column: the way}; a column that has no row is left out."""
Rows = dict[tuple[str, str], dict[str, Any]]


def main() -> None:
    """Print the tables, or write them where the page wants them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true", help="fail where the page holds others")
    options, found, page = parser.parse_args(), every(), report.ROOT / PAGE
    if options.check:
        pages = {(PAGE, mark): text for mark, text in found.items()}
        return report.check(pages, "context_parallel_report")
    if not options.write:
        print("\n".join(found.values()))
        return
    for mark, text in found.items():
        page.write_text(report.put_in(page.read_text(), mark, text))


def every(folder: Path = FOLDER) -> dict[str, str]:
    """Return {mark: what the page has to hold between its marks of that name}; nothing where
    nothing was measured.
    """
    others = {
        "step-to-step": step_to_step,
        "trainer": trainer,
        "curves": curves,
    }
    found = {MARK: tables(sorted(folder.glob("*-x2-context-parallel*.jsonl")))}
    # the newest; what it says of two is beside what was measured
    found[f"{MARK}-predicted"] = "".join(
        map(of_more, sorted(folder.glob("*-predicted.jsonl"))[-1:])
    )
    found |= {
        f"{MARK}-{name}": "\n".join(map(make, sorted(folder.glob(f"*-x2-{name}*.jsonl"))))
        for name, make in others.items()
    }
    found[f"{MARK}-fsdp2"] = fsdp2(sorted(folder.glob("*-x2-fsdp2*.jsonl"), key=_run))
    measured = (gradients(path) for path in sorted(folder.glob("*-x2-context-parallel*.jsonl")))
    return found | {f"{MARK}-gradients": "\n".join(filter(None, measured))}


def tables(paths: Sequence[Path]) -> str:
    """Return one table for each file, under what it was measured on, as Markdown."""
    return "\n".join(map(table, paths))


def table(path: Path) -> str:
    """Return the rows of one file."""
    lines = read_lines(path)
    rows = _rows(path)
    rates = [
        f"exchanges at {line['rate'] / 1e9:.0f} GB/s and {line['latency_s'] * 1e6:.0f} us"
        for line in lines
        if line["workload"] == "exchanges"
    ]
    names = [
        (key[0].removesuffix("-cp1"), key[1])
        for key in rows
        if key[0].endswith("-cp1") and "skipped" not in rows[key]
    ]
    ways = {
        title: way
        for title, way in HEAD.items()
        if not way or any(_of(way, *name, rows) for name in names)
    }
    predicted = ["predicted, state"] * any(way.endswith("predicted") for _, way in rows)
    head = ("whole step without optimizer", *ways, *predicted)
    body = (
        _line(*name, list(ways.values()), rows, with_prediction=bool(predicted)) for name in names
    )
    return "\n".join([caption(path, "".join(rates[-1:])), "", *as_table(head, body), ""])


def of_more(path: Path) -> str:
    """Return the table of what one GPU predicts of four and eight that share a row."""
    rows = _rows(path)
    worlds = [world for world in (4, 8) if any(name.endswith(f"-cp{world}") for name, _ in rows)]
    body = []
    for workload, documents in rows:
        name = workload.removesuffix("-cp1")
        if name == workload:
            continue
        of_worlds = (
            rows.get((f"{name}-cp{world}", f"{documents}, state, predicted"), {})
            for world in worlds
        )
        alone = rows[workload, documents]
        cells = " | ".join(map(_cell, (alone, *of_worlds)))
        body.append(f"| {_title(name, documents, alone)} | {cells} |")
    about = next(line for line in read_lines(path) if line["workload"] == "machine")
    predicted = (f"{world} GPUs, predicted" for world in worlds)
    head = ("whole step without optimizer", "one GPU, measured", *predicted)
    made = (
        f"Predicted from one {about['machine']}, {about['date']} "
        f"(`tests/benchmarks/results/parallel/{path.name}`); {_of_two(path.parent)}:"
    )
    return "\n".join([made, "", *as_table(head, body), ""])


def _of_two(folder: Path) -> str:
    """Say how far predictions of two GPUs were from what was measured beside them."""
    off = []
    for path in sorted(folder.glob("*-x2-context-parallel*.jsonl")):
        rows = _rows(path)
        for (workload, variant), row in rows.items():
            beside = rows.get((workload, variant.removesuffix(", predicted")), {})
            if variant.endswith(", predicted") and "ms" in row and "ms" in beside:
                off.append(100 * (row["ms"] / beside["ms"] - 1))
    if not off:
        return "no such prediction of two GPUs has a row that was measured"
    return (
        f"such predictions of two GPUs, {len(off)}, were {min(off):+.1f}% to {max(off):+.1f}% off"
    )


def caption(path: Path, more: str = "") -> str:
    """Say what the rows of a file were made on."""
    about = _machine(path)
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("torch", "transformers"))
    return (
        f"Two {about['machine']} of one host ({about['processor']}), {about['date']}, {versions}"
        f"{'; ' * bool(more)}{more} (`tests/benchmarks/results/parallel/{path.name}`):"
    )


def _machine(path: Path) -> dict[str, Any]:
    return next(line for line in read_lines(path) if line["workload"] == "machine")


def as_table(head: Sequence[str], body: Iterable[str]) -> list[str]:
    """Return the lines of a table, as Markdown."""
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *body]


def _of(way: str, workload: str, documents: str, rows: Rows) -> dict[str, Any]:
    """Return the row of one GPU, or of two by a way."""
    if not way:
        return rows[f"{workload}-cp1", documents]
    return rows.get((f"{workload}-cp2", f"{documents}, {way}"), {})


def _line(
    workload: str, documents: str, ways: Sequence[str], rows: Rows, with_prediction: bool
) -> str:
    found = [_of(way, workload, documents, rows) for way in ways]
    title = _title(workload, documents, next((row for row in found if "tokens" in row), {}))
    predicted = _predicted(
        _of("state, predicted", workload, documents, rows), _of("state", workload, documents, rows)
    )
    cells = [*map(_cell, found), *[predicted] * with_prediction]
    return f"| {title} | {' | '.join(cells)} |"


def _title(workload: str, documents: str, facts: dict[str, Any]) -> str:
    """Say what a row is of; `facts` are those of one of its ways."""
    model, size, *kind = workload.split("-")
    # of rows that found no memory
    tokens = facts.get("tokens") or 1024 * int(size[:-1])
    parts = [
        f"{model.upper()} shape{' (8 layers)' * (model == '9b')}, {tokens:,} tokens",
        *(KINDS[part] for part in (size, *kind) if part in KINDS),
        *["layers recomputed"] * facts.get("recomputed", False),
        documents,
    ]
    return ", ".join(parts)


def _cell(row: dict[str, Any]) -> str:
    if "ms" not in row:
        return "out of memory" if "OutOfMemory" in row.get("error", "") else ""
    # what graphs keep is reserved, not allocated
    gib = row.get("reserved_gib", row["peak_gib"])
    parts = [f"{row['ms']:,.0f} ms", f"{gib:.0f} GiB"]
    if "received_gib" in row:
        parts.append(f"{row['received_gib']:.1f} GiB received")
    if "efficiency" in row:
        parts.append(f"efficiency {row['efficiency']:.3f}")
    return ", ".join(parts)


def _predicted(row: dict[str, Any], measured: dict[str, Any]) -> str:
    if "ms" not in row or "ms" not in measured:
        return ""
    return f"{row['ms']:,.0f} ms ({100 * (row['ms'] / measured['ms'] - 1):+.1f}%)"


def _run(path: Path) -> tuple[str, int]:
    """Return the day of a file, and its number on that day: without one, the first."""
    number = path.stem.rpartition("fsdp2")[2].strip("-")
    return path.stem[:10], int(number or 1)


def fsdp2(paths: Sequence[Path]) -> str:
    """Return the tables of whole steps under FSDP2, a line for each run, and DDP's; columns of
    which nothing was run are left out.
    """
    titles = {
        "2b-32k-fsdp2": "Full training, 32,768 tokens a rank",
        "2b-8k-fsdp2": "Full training, 8,192 tokens a rank",
        "2b-32k-lora-fsdp2": "LoRA r=16, 32,768 tokens a rank",
        "2b-8k-lora-fsdp2": "LoRA r=16, 8,192 tokens a rank",
    }
    runs = {path: _rows(path) for path in paths}
    text = [table for work, title in titles.items() for table in _sharded(work, title, runs)]
    return "\n".join([*text, *(line for path, rows in runs.items() for line in _ddp(path, rows))])


def _sharded(work: str, title: str, runs: dict[Path, Rows]) -> list[str]:
    """Return the lines of one workload's table."""
    kept = "groups of 2, 11 and 11 layers, weights kept"
    names = {
        "transformers, packed": "unpatched packed",
        "composed by hand": "composed without packfree",
        "packfree": "packfree",
        "with CUDA graphs": "packfree, CUDA graphs",
        "groups of 4, kept": "packfree, wrapped: groups of 4 layers, weights kept",
        "groups of 2, 11, 11, kept": f"packfree, wrapped: {kept}",
        "those, graphs": f"packfree, CUDA graphs, wrapped: {kept}",
        "frozen weights whole": "packfree, wrapped: frozen weights whole",
        "those whole, graphs": "packfree, CUDA graphs, wrapped: frozen weights whole",
        "packfree, one GPU, bf16 weights": "packfree, one GPU",
    }
    columns = {
        column: name
        for column, name in names.items()
        if any((work, name) in rows for rows in runs.values())
    }
    body = []
    for path, rows in runs.items():
        cells = [_cell(rows.get((work, name), {})) for name in columns.values()]
        if any(cells):
            body.append(f"| {_host(path)} | {' | '.join(cells)} |")
    return [*as_table((title, *columns), body), ""]


def _host(path: Path) -> str:
    (day, number), kind = _run(path), _machine(path)["machine"].split()[1]
    return f"{kind}s, {day}{f' ({number})' if number > 1 else ''}"


def _ddp(path: Path, rows: Rows) -> list[str]:
    """Return the lines of a table of DDP's steps, with CUDA graphs and without: times alone, for the
    peak of what is allocated has nothing of a graph's memory.
    """
    names = {
        "2b-2k-ddp": "full training, 2,048 tokens a rank",
        "2b-8k-ddp": "full training, 8,192 tokens a rank",
        "2b-8k-lora-ddp": "LoRA r=16, 8,192 tokens a rank",
    }
    ways = {
        "packfree, with CUDA graphs": "packfree",
        "the backward pass in one graph": "packfree, backward pass in one graph",
        "without graphs": "packfree, no graphs",
        "packfree, one GPU": "packfree, one GPU",
    }
    body = []
    for work, title in names.items():
        found = [rows.get((work, way), {}) for way in ways.values()]
        if "ms" in found[0]:
            times = (f"{row['ms']:,.0f} ms" if "ms" in row else "" for row in found)
            body.append(f"| {title} | {' | '.join(times)} |")
    head = f"DDP over two, autocast, {_host(path)}", *ways
    return [*as_table(head, body), ""] if body else []


def step_to_step(path: Path) -> str:
    """Return the table of `trainer.train()` under FSDP2, with the memory that a rank reserves."""
    titles = {
        "trl-8k-lora-fsdp2": "`SFTTrainer`, LoRA, its defaults (layers recomputed)",
        "trainer-8k-full-fsdp2": "`Trainer(bf16=True)`, full training",
    }
    names = {
        "transformers, packed": "unpatched packed",
        "packfree, no graphs": "packfree, no graphs",
        "packfree": "packfree",
        "packfree, `activation_checkpointing`": "packfree, FSDP recomputes",
    }
    rows = _rows(path)
    body = [
        f"| {title} | {' | '.join(_cell(rows.get((work, name), {})) for name in names.values())} |"
        for work, title in titles.items()
    ]
    head = ("FSDP2 over two, step to step, 8,192 tokens a rank", *names)
    return "\n".join([caption(path, "fp32 shards, autocast"), "", *as_table(head, body), ""])


def trainer(path: Path) -> str:
    """Return the table of the Trainer's steps: the same documents shared by tokens and by rows.

    The losses that it logs are rounded to bf16 by FSDP2, and tell nothing apart.
    """
    rows = _rows(path)
    titles = {"full": "full training", "recomputed": "layers recomputed", "lora": "LoRA"}
    ways = {"`cp_size=2`": "context parallelism", "`dp_shard_size=2`": "data parallelism"}
    body = []
    for kind, title in titles.items():
        found = [
            rows.get((f"2b-64k-trainer-{kind}", f"{way} over two GPUs, FSDP2"), {})
            for way in ways.values()
        ]
        body.append(f"| {title} | {' | '.join(map(_cell, found))} |")
    head = ("2B shape, 65,536 tokens, 8k documents", *ways)
    return "\n".join([caption(path), "", *as_table(head, body), ""])


def curves(path: Path) -> str:
    """Return the plot of 200 steps, and how far losses are from one GPU's."""
    lines = {name: row for (_, name), row in _rows(path).items() if "micronats" in row}
    if "one GPU" not in lines:
        return ""
    tokens, layers = (lines["one GPU"][name] for name in ("tokens", "layers"))
    rows = {name: row["micronats"] for name, row in lines.items()}
    one = rows.pop("one GPU")
    steps = len(one)
    apart = {name: [abs(a - b) / 1e6 for a, b in zip(losses, one)] for name, losses in rows.items()}
    said = "; ".join(
        f"{name} {fmean(each):.4f}, {max(each):.4f} at most" for name, each in apart.items()
    )
    return (
        f"![Losses of {steps} steps on one GPU and on two, and their difference]"
        f"(context_parallel.png)\n\n{caption(path).rstrip(':')}. The files of Python's library, byte "
        f"by byte, in rows of {tokens:,} tokens through {layers} layers of the 2B shape, fp32 weights "
        "under bf16 autocast. Differences from one GPU's loss in "
        f"{steps} steps, in nats a byte, in the mean: {said}. Documents in reverse are what rounding "
        "alone does.\n"
    )


def gradients(path: Path) -> str:
    """Return the table of errors of bf16 gradients to fp32, if the file has them."""
    found = [line for line in read_lines(path) if line["workload"] == "gradients"]
    body = [
        f"| {row['variant']} | {row['tokens']:,} | {row['all']:.2e} | {row['worst']:.2e} |"
        for row in found
    ]
    head = ("bf16 gradients against fp32, relative RMS", "tokens", "all", "worst parameter's")
    return "\n".join([caption(path), "", *as_table(head, body), ""]) if found else ""


def _rows(path: Path) -> Rows:
    return {(line["workload"], line["variant"]): line for line in read_lines(path)}


if __name__ == "__main__":
    main()
