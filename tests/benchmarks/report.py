"""Write the GPU tables of README and docs, and the plot, from the newest result.

python -m tests.benchmarks.report # print the tables python -m tests.benchmarks.report --write # put
them between marks such as `<!-- gpu -->` and `<!-- /gpu -->`, and plot
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests/benchmarks/results"
PLOT = "docs/speed.png"
FLOOR = "matrix products alone"
UNPATCHED = ("unpatched padded", "unpatched packed", "stock padded")
TOP = (
    "2b-32k-lora-autocast",
    "2b-32k-lora-fp32-base-autocast",
    "2b-32k-whole-step-autocast",
    "2b-8k-lora-autocast",
    "trl-8k-lora",
    "trl-ragged-lora",
    "trl-8k-lora-padding-free",
    "trl-2k-lora",
    "trl-8k-qlora",
    "trainer-8k-full",
    "2b-32k-whole-step",
    "2b-8k-whole-step",
    "2b-32k-packed",
    "2b-8x2048-padded",
    "2b-64k-packed",
    "2b-8x2048-whole-step",
    "2b-32k-lora",
    "2b-32k-lora-bf16",
    "2b-32k-qlora",
    "2b-vl-16docs",
    "9b-32k-packed",
    "9b-8x2048-padded",
    "moe-32k-packed",
    "moe-8x2048-padded",
)
"""Workloads of the first table, as many as it has rows for: what people run by default first."""
MOST = 13
"""Rows of the first table."""
SIDES = {
    "transformers, padded": ("unpatched padded", "stock padded"),
    "transformers, packed": ("unpatched packed",),
    "composed by hand": ("composed without packfree",),
    "Unsloth": ("unsloth",),
    "packfree": ("packfree", "packfree, packed", "packfree, padded", "packfree+liger"),
}
"""{column: variants of which the first that was timed is shown}."""
TITLES = {
    "2b-32k-lora-autocast": "LoRA r=16, bf16 base, adapters in fp32, bf16 autocast, whole step, "
    "32,768 tokens",
    "2b-8k-lora-autocast": "LoRA r=16, bf16 base, adapters in fp32, bf16 autocast, whole step, "
    "8,192 tokens",
    "2b-32k-lora-fp32-base-autocast": "LoRA r=16, fp32 base, bf16 autocast (TRL's default), whole "
    "step, 32,768 tokens",
    "2b-8k-lora-fp32-base-autocast": "LoRA r=16, fp32 base, bf16 autocast, whole step, 8,192 tokens",
    "2b-32k-whole-step-autocast": "Full training, fp32 weights, bf16 autocast, whole step, 32,768 "
    "tokens",
    "2b-8k-whole-step-autocast": "Full training, fp32 weights, bf16 autocast, whole step, 8,192 "
    "tokens",
    "2b-docs-lora-autocast": "LoRA r=16, bf16 base, adapters in fp32, bf16 autocast, whole step, "
    "{documents} documents",
    "unsloth-8k-trainer": "Unsloth's `trainer.train()`, LoRA r=16, bf16 base, adapters in fp32, bf16 "
    "autocast, step to step, rows of up to 8,192 tokens",
    "unsloth-8k-qlora-trainer": "Unsloth's `trainer.train()`, QLoRA r=16 (NF4), bf16 autocast, step to "
    "step, rows of up to 8,192 tokens",
    "unsloth-8k-full-trainer": "Unsloth's `trainer.train()`, full training, fp32 weights, bf16 "
    "autocast, step to step, rows of up to 8,192 tokens",
    "trl-8k-lora": "`SFTTrainer`, LoRA, its defaults (fp32 base, bf16 autocast, layers "
    "recomputed), step to step, 8,192 tokens",
    "trl-ragged-lora": "`SFTTrainer`, LoRA, its defaults, padded batches of 8 documents of up to 1,024 "
    "tokens, step to step",
    "trl-2k-lora": "`SFTTrainer`, LoRA, its defaults, step to step, 2,048 tokens",
    "trl-8k-lora-padding-free": "`SFTTrainer`, LoRA, `padding_free=True`, its defaults, step to step, "
    "8,192 tokens",
    "trl-8k-qlora": "`SFTTrainer`, QLoRA (NF4, prepared by `prepare_model_for_kbit_training`), bf16 "
    "autocast, layers recomputed, step to step, 8,192 tokens",
    "trl-8k-full": "`SFTTrainer`, full training, its defaults, step to step, 8,192 tokens",
    "trainer-8k-full": "`Trainer(bf16=True)`, full training, fp32 weights, step to step, 8,192 "
    "tokens",
    "2b-32k-packed": "2B shape, 32,768 tokens in {documents} documents",
    "2b-64k-packed": "2B shape, 65,536 tokens",
    "2b-32k-checkpointing": "2B shape, 32,768 tokens, layers recomputed in the backward pass "
    "(gradient checkpointing)",
    "2b-128k-checkpointing": "2B shape, 131,072 tokens, layers recomputed in the backward pass",
    "loss 32768 x 248320 x 2048": "Head and loss alone, 32,768 tokens, a vocabulary of 248,320",
    "2b-32k-mtp": "2B shape, whole step, 32,768 tokens, with a multi-token prediction head",
    "2b-32k-lora": "2B shape, LoRA r=16 on every linear layer, adapters in fp32 (PEFT's default), "
    "32,768 tokens",
    "2b-32k-dora": "2B shape, DoRA r=16 on every linear layer, adapters in fp32, 32,768 tokens",
    "2b-32k-qlora": "2B shape, bitsandbytes' NF4, LoRA r=16 on every linear layer, adapters in "
    "fp32, 32,768 tokens",
    "2b-32k-lora-bf16": "2B shape, LoRA r=16 on every linear layer, adapters in bf16, 32,768 "
    "tokens",
    "2b-32k-whole-step": "2B shape with head, loss and fused AdamW, 32,768 tokens",
    "2b-8k-whole-step": "2B shape with head, loss and fused AdamW, 8,192 tokens",
    "2b-8x2048-whole-step": "2B shape with head, loss and fused AdamW, 8 rows of 2,048 tokens, "
    "{fill:.0%} of them real",
    "2b-8x2048-padded": "2B shape, 8 rows of 2,048 tokens, {fill:.0%} of them real",
    "2b-vl-16docs": "2B shape with its vision tower, {documents} documents with images, {fill:.0%} "
    "of the padded batch real",
    "9b-32k-packed": "9B shape ({layers} layers), 32,768 tokens",
    "9b-4k-packed": "9B shape, 4,096 tokens in documents of 500",
    "9b-8x2048-padded": "9B shape, 8 rows of 2,048 tokens, {fill:.0%} of them real",
    "moe-32k-packed": "MoE, 64 experts, 8 a token ({layers} layers), 32,768 tokens",
    "moe-4k-packed": "MoE, 4,096 tokens in documents of 500",
    "moe-8x2048-padded": "MoE, 8 rows of 2,048 tokens, {fill:.0%} of them real",
}
ALONE = re.compile(r"(trunk.+): (values|.*gradients?\b.*), packed against alone")
WHOLE = r"logits |verify_packing |\d+ steps|FLA, largest shapes against"
"""Errors that the tables show: of trunks, and of whole models; those of single operations are in
the result alone.
"""
GONE = ("flash_qla_cut", "packfree+liger, one document, cut")
"""Variants of results that the package no longer has; no table shows them."""
SHORT = {
    "2b-32k-lora-autocast": ("unpatched packed", "packfree"),
    "2b-32k-lora-fp32-base-autocast": ("unpatched packed", "packfree"),
    "2b-32k-whole-step-autocast": ("unpatched packed", "packfree"),
    "trl-8k-lora": ("unpatched packed", "packfree"),
    "trl-ragged-lora": ("unpatched padded", "packfree"),
    "trl-8k-qlora": ("unpatched packed", "packfree"),
    "trainer-8k-full": ("unpatched packed", "packfree"),
    "2b-32k-packed": ("unpatched packed", "packfree"),
    "2b-32k-whole-step": ("unpatched packed", "packfree"),
    "2b-32k-lora": ("unpatched packed", "packfree"),
    "2b-8x2048-padded": ("unpatched padded", "packfree, padded"),
    "2b-vl-16docs": ("stock padded", "packfree, padded"),
    "moe-8x2048-padded": ("unpatched padded", "packfree, padded"),
}
"""README's rows: by workload, the unpatched variant and ours."""
SHORT_HEAD = ("one training step", "transformers", "composed by hand", "Unsloth", "packfree")
PACKAGES = (
    "hf_packfree",
    "torch",
    "triton",
    "transformers",
    "fla-core",
    "flash-qla",
    "liger-kernel",
    "nvidia-cutlass-dsl",
    "trl",
    "cut-cross-entropy",
    "causal-conv1d",
    "mamba-ssm",
)
"""What a table names the releases of."""
SCRIPT = "tests.benchmarks.run_all"
"""What makes a result, where it does not say so itself."""
BARS = {
    "real_tokens_per_s": "real tokens per second (longer is better)",
    "peak_gib": "peak GiB (shorter is better)",
}
COLOURS = dict(zip(SIDES, ("#999999", "#D55E00", "#E69F00", "#CC79A7", "#0072B2")))
"""Okabe and Ito's: different for colour-blind people and in print."""


REMOVED = {"autograd bypass", "launcher, bypass and fast path", "longest first"}
"""What an earlier result timed, and is no more."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, or write them where the pages want them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--result", type=Path, help="a result; the newest in tests/benchmarks/results if not given"
    )
    parser.add_argument(
        "--ablation",
        type=Path,
        nargs="*",
        help="results of tests.benchmarks.ablation; all that are there if not given",
    )
    parser.add_argument(
        "--write",
        nargs="?",
        type=Path,
        const=ROOT,
        help="write tables and plot into this checkout's pages",
    )
    parser.add_argument("--check", action="store_true", help="fail where a page holds others")
    options = parser.parse_args(arguments)
    from tests.benchmarks import short_report

    path = options.result or newest(RESULTS)
    found = every_table(path, options.ablation or ablations())
    if options.check:
        return check(found)
    if options.write is None:
        print("\n".join(found.values()))
        return
    draw(json.loads(path.read_text()), options.write / PLOT)
    short_report.draw(short_report.plotted(), options.write / short_report.PLOT)
    for (page, mark), text in found.items():
        (options.write / page).write_text(put_in((options.write / page).read_text(), mark, text))


def check(found: dict[tuple[str, str], str], module: str = "report") -> None:
    """Exit with the names of pages that do not hold these tables, {(page, mark): table}."""
    held = {page: (ROOT / page).read_text() for page, _ in found}
    stale = {
        page for (page, mark), text in found.items() if put_in(held[page], mark, text) != held[page]
    }
    if stale:
        command = f"python -m tests.benchmarks.{module} --write"
        sys.exit(f"found other tables in {sorted(stale)}; wanted those of the results; {command}")


def ablations() -> list[Path]:
    """Return the results of `tests.benchmarks.ablation`, the newest first."""
    return sorted(RESULTS.glob("*-ablation.jsonl"), reverse=True)


def every_table(path: Path, ablated: Sequence[Path]) -> dict[tuple[str, str], str]:
    """Return `tables` and those of the modules that make others, of their newest results."""
    # which have the functions of this one below them
    from tests.benchmarks import (
        family_report,
        host_report,
        log_prob_report,
        prefix_report,
        short_report,
    )

    found = tables(path, ablated) | short_report.tables()
    for module in (host_report, prefix_report):
        found |= module.tables(module.newest())
    found |= family_report.tables(family_report.newest_of_each())
    return found | log_prob_report.tables(log_prob_report.results())


def tables(path: Path, ablated: Sequence[Path]) -> dict[tuple[str, str], str]:
    """Return {(page, mark): what the page has to hold between its marks of that name}, as
    Markdown.
    """
    result = json.loads(path.read_text())
    image = (
        "![Tokens per second and memory of one training step, by workload: "
        f"{'; '.join(sides_of(chosen(result)))}]({Path(PLOT).name})\n"
    )
    speed = "\n".join(part for part in (head(result, path.name), image, top(result)) if part)
    every = "\n".join(part for part in (steps(result), linearity(result)) if part)
    return {
        ("README.md", "gpu"): summary(result),
        ("docs/performance.md", "gpu"): speed,
        ("docs/rows.md", "rows"): every,
        ("docs/performance.md", "operations"): operations(result),
        ("docs/performance.md", "ablation"): "\n".join(map(ablation, ablated)),
        ("docs/numerics.md", "gpu"): exactness(result),
    }


def newest_of_each(folder: Path) -> list[Path]:
    """Return the newest result of each machine, the latest date first."""
    date = len("2026-11-25-")
    of_machines = {path.stem[date:]: path for path in sorted(folder.glob("*.json"))}
    return sorted(of_machines.values(), reverse=True)


def newest(folder: Path, pattern: str = "*.json") -> Path:
    """Return the result with the latest date in its name."""
    found = sorted(folder.glob(pattern))
    if not found:
        command = f"python -m tests.benchmarks.run_all --out {folder}"
        raise FileNotFoundError(f"found no {pattern} in {folder}; wanted a result; run {command}")
    return found[-1]


def put_in(page: str, mark: str, text: str) -> str:
    """Return the page with `text` between its marks of that name."""
    marks = re.compile(rf"(<!-- {mark}\b[^>]*-->\n).*?(<!-- /{mark} -->)", re.S)
    if len(marks.findall(page)) != 1:
        raise ValueError(
            f"found not exactly one pair of `<!-- {mark} -->` and `<!-- /{mark} -->` lines; wanted "
            f"one; add it"
        )
    return marks.sub(lambda found: f"{found[1]}{text}{found[2]}", page)


def head(result: dict[str, Any], name: str) -> str:
    """Return what the first table was made with, and where every number is."""
    rows = [row for _, cells in chosen(result) for row in cells.values()]
    if not rows:
        return ""
    return (
        "Where a row says nothing else, a step is forward and backward of the trunk with bf16 "
        f"weights, without autocast. {origin(result, rows)}; every number is in "
        f"`tests/benchmarks/results/{name}`.\n"
    )


def origin(result: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Say when, on what and with what the rows were made; what differs between runs is in the order
    of `rows`.
    """
    runs = [about(result, run) for run in dict.fromkeys(row.get("run", 1) for row in rows)]
    found = ((name, _each(run["versions"].get(name, "") for run in runs)) for name in PACKAGES)
    versions = ", ".join(f"{name} {releases}" for name, releases in found if releases)
    several = f" in {len(runs)} runs, each" if len(runs) > 1 else ""
    return (
        f"Made on {_each(run['date'] for run in runs)}{several} on one "
        f"{_each(run['machine'] for run in runs)} with {versions}"
    )


def about(result: dict[str, Any], run: int) -> dict[str, Any]:
    """Return when, on what, of which source and with what a run was made."""
    return result.get("runs", {"1": result})[str(run)]


def _each(texts: Iterable[str]) -> str:
    *others, last = dict.fromkeys(text for text in texts if text) or [""]
    return " and ".join([", ".join(others)] * bool(others) + [last])


def top(result: dict[str, Any]) -> str:
    """The first table: a row for each of the workloads of `TOP`, and whatever was timed in one run
    with packfree's own step.
    """
    found = chosen(result)
    sides = sides_of(found)
    lines = [f"| one training step | {' | '.join(sides)} |", "|---" * (len(sides) + 1) + "|"]
    for title, cells in found:
        texts = (_cell(cells[side]) if side in cells else "" for side in sides)
        lines.append(f"| {title} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n" if found else ""


def chosen(result: dict[str, Any]) -> list[tuple[str, dict[str, dict[str, Any]]]]:
    """Return (title, {side: row}) of the workloads of the first table, of each the rows of its
    newest run alone.
    """
    found = []
    for workload in TOP:
        rows = rows_of(result, workload)
        newest_run = max((row.get("run", 1) for row in rows.values()), default=1)
        rows = {name: row for name, row in rows.items() if row.get("run", 1) == newest_run}
        ours = [row for name in SIDES["packfree"] if "ms" in (row := rows.get(name, {}))]
        beside = _beside(rows, ours[0]) if ours else {}
        if len(beside) > 1:
            found.append((heading(TITLES[workload], rows), beside))
    return found[:MOST]


def sides_of(found: list[tuple[str, dict[str, dict[str, Any]]]]) -> list[str]:
    """Return the columns that have a cell."""
    return [side for side in SIDES if any(side in cells for _, cells in found)]


def _beside(rows: dict[str, dict[str, Any]], ours: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{side: its row}; rows that found no memory among them."""
    same = {name: row for name, row in rows.items() if _is_shown(row)}
    firsts = {
        side: next((same[name] for name in names if name in same), None)
        for side, names in SIDES.items()
    }
    return {side: row for side, row in (firsts | {"packfree": ours}).items() if row is not None}


def summary(result: dict[str, Any]) -> str:
    """README's table: the workloads of `SHORT`, unpatched, composed by hand and Unsloth beside
    patched; * marks what was not timed in one run with ours.
    """
    lines = [f"| {' | '.join(SHORT_HEAD)} |", "|---" * len(SHORT_HEAD) + "|"]
    for workload, variants in SHORT.items():
        rows = rows_of(result, workload)
        stock, ours = (rows.get(variant, {}) for variant in variants)
        if "ms" in ours:
            others = (stock, rows.get("composed without packfree"), rows.get("unsloth"))
            cells = [_beside_ours(row, ours) if row is not None else "" for row in others]
            cells += [_cell(ours)]
            lines.append(f"| {heading(TITLES[workload], rows)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _beside_ours(row: dict[str, Any], ours: dict[str, Any]) -> str:
    """A row's cell, and how many times as long as ours it takes."""
    if "ms" not in row:
        return _cell(row)
    mark = " *" * (row.get("run", 1) != ours.get("run", 1))
    return f"{_cell(row)} ({row['ms'] / ours['ms']:.1f} x{mark})"


def _cell(row: dict[str, Any]) -> str:
    return (
        f"{row['ms']:,.0f} ms, {row['peak_gib']:.0f} GiB"
        if "ms" in row
        else _outcome(row, "not measured")
    )


def _outcome(row: dict[str, Any], missing: str) -> str:
    """What a row without timings says."""
    kind = row.get("error", missing).split(":")[0]
    return "out of memory" if kind == "OutOfMemoryError" else kind


def steps(result: dict[str, Any]) -> str:
    """Every row of the workloads, a table for each run, the newest first; by speed, and without
    what did not run for another reason than memory.
    """
    runs = sorted({row.get("run", 1) for row in result["rows"]}, reverse=True)
    return "\n".join(
        text
        for run in runs
        if (text := _run(result | {"rows": _of_run(result, run)}, about(result, run)))
    )


def _of_run(result: dict[str, Any], run: int) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row.get("run", 1) == run]


def _run(result: dict[str, Any], made: dict[str, Any]) -> str:
    """The table of one run, below what it was made with."""
    titles = (
        "one step",
        "ms",
        "real tokens/s",
        "peak GiB",
        "real tokens per GiB",
        "against unpatched",
        "times the matrix products",
    )
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for workload, title in TITLES.items():
        rows = rows_of(result, workload)
        shown = [row for row in (*rows.values(), *_sustained(rows)) if _is_shown(row)]
        if shown:
            lines.append(f"| **{heading(title, rows)}** | | | | | | |")
            shown.sort(key=lambda row: -row.get("real_tokens_per_s", 0))
            lines += [_line(row, rows) for row in shown]
    return f"{_made(made)}\n\n" + "\n".join(lines) + "\n" if len(lines) > 2 else ""


def _made(run: dict[str, Any]) -> str:
    """Say when, on what, of which source and with what a run was made."""
    versions = ", ".join(f"{name} {found}" for name, found in run["versions"].items())
    source = f" (source {run['source']})" if "source" in run else ""
    return (
        f"## {run['date']}, {run['machine']}\n\n`python -m {run.get('script', SCRIPT)}`, package of "
        f"commit {run.get('commit', 'unknown')}{source}; {versions}."
    )


def _is_shown(row: dict[str, Any]) -> bool:
    return "ms" in row or row.get("error", "").startswith("OutOfMemoryError")


def rows_of(result: dict[str, Any], workload: str) -> dict[str, dict[str, Any]]:
    """{variant: row} of one workload, skipped rows left out."""
    return {
        row["variant"]: row
        for row in result["rows"]
        if row["workload"] == workload and "skipped" not in row and row["variant"] not in GONE
    }


def heading(title: str, rows: dict[str, dict[str, Any]]) -> str:
    """Fill the title from the first row that has documents."""
    facts = next((row for row in rows.values() if "documents" in row), {})
    padded = next((row for row in rows.values() if row.get("input_format") == "padded"), facts)
    fill = padded.get("real_tokens", 0) / padded.get("tokens", 1)
    return title.format(
        documents=facts.get("documents", "?"), layers=facts.get("layers", "?"), fill=fill
    )


def _sustained(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The matrix products of a step after those of another, as a row of its own."""
    floor = rows.get(FLOOR, {})
    if "sustained_ms" not in floor:
        return []
    speed = floor["real_tokens_per_s"] * floor["ms"] / floor["sustained_ms"]
    return [
        floor
        | {
            "variant": f"{FLOOR}, step after step",
            "ms": floor["sustained_ms"],
            "real_tokens_per_s": speed,
        }
    ]


def _line(row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> str:
    if "ms" not in row:
        return f"| {row['variant']} | {_outcome(row, 'no result')} | | | | | |"
    base = next((r for variant in UNPATCHED if "ms" in (r := rows.get(variant, {}))), None)
    alone = row["variant"].startswith(FLOOR) or row["variant"].endswith("tower alone")
    against = (
        f"{row['real_tokens_per_s'] / base['real_tokens_per_s']:.2f} x"
        if base and not alone
        else ""
    )
    floor = rows.get(FLOOR, {}).get("ms")
    times = f"{row['ms'] / floor:.2f}" if floor else ""
    tokens = row["real_tokens_per_s"] * row["ms"] / 1e3
    memory = " | " if alone else f"{row['peak_gib']:.1f} | {tokens / row['peak_gib']:,.0f}"
    return (
        f"| {row['variant']} | {row['ms']:,.0f} | {row['real_tokens_per_s']:,.0f} | {memory} | "
        f"{against} | {times} |"
    )


def linearity(result: dict[str, Any]) -> str:
    """Real tokens/s by row length and document length."""
    found = {
        (row["workload"], row["variant"]): row
        for row in result["rows"]
        if row["workload"].startswith("2b-8layers-")
    }
    if not found:
        return ""
    sizes = list(dict.fromkeys(workload for workload, _ in found))
    kinds = sorted(
        {variant for _, variant in found},
        key=lambda kind: int("0" + re.sub(r"\D", "", kind)) or 1e9,
    )
    lines = [
        "## By length\n",
        "| real tokens/s, 8 layers of the 2B shape | "
        f"{' | '.join(size.split('-')[-1] for size in sizes)} |",
    ]
    lines.append("|---|" + "---|" * len(sizes))
    for kind in kinds:
        cells = (found.get((size, kind), {}).get("real_tokens_per_s") for size in sizes)
        lines.append(f"| {kind} | {' | '.join(f'{cell:,.0f}' if cell else '' for cell in cells)} |")
    return "\n".join(lines) + "\n"


def operations(result: dict[str, Any]) -> str:
    """One table of the operations of a layer, by backend: time and memory of forward and
    backward.
    """
    names = dict.fromkeys(
        row["workload"] for row in result["rows"] if row["workload"].startswith("layer ")
    )
    if not names:
        return ""
    made = origin(result, [row for row in result["rows"] if row["workload"] in names])
    lines = [
        f"{made}:\n",
        "| forward and backward over 32,768 tokens | by backend, the fastest first |",
        "|---|---|",
    ]
    for work in names:
        timed = sorted(
            (row for row in rows_of(result, work).values() if "ms" in row),
            key=lambda row: row["ms"],
        )
        cells = (
            f"`{row['variant']}` {row['ms']:.2f} ms, {row['peak_gib']:.2f} GiB" for row in timed
        )
        lines.append(f"| {work.removeprefix('layer ')} | {'; '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ablation(path: Path) -> str:
    """Step times without a fast path, in times the step with all of them."""
    about, *every = (json.loads(line) for line in path.read_text().splitlines())
    rows = [row for row in every if row["off"] not in REMOVED]
    ratios = {
        (row["workload"], row["off"]): f"{row['ratio']:.3f} ({row['ratio_of_best']:.3f})"
        for row in rows
    }
    off = [what for what in dict.fromkeys(row["off"] for row in rows) if what != "nothing"]
    lines = [
        "Time of one step without a fast path, in times the step with all of them: medians, best "
        f"steps in brackets, timed in turns on {about['date']} on one {about['machine']}; every "
        f"number is in `tests/benchmarks/results/{path.name}`.",
        "",
        f"| without | {' | '.join(off)} |",
        "|---" * (1 + len(off)) + "|",
    ]
    for work in dict.fromkeys(row["workload"] for row in rows):
        lines.append(f"| {work} | {' | '.join(ratios.get((work, what), '') for what in off)} |")
    return "\n".join(lines) + "\n"


def exactness(result: dict[str, Any]) -> str:
    """Relative RMS errors of documents in a row against documents alone and of whole models, and
    the tests' outcomes.
    """
    alone: dict[str, dict[str, dict[str, Any]]] = {}
    others = []
    for line in sorted(result["errors"], key=lambda line: line["what"]):
        if (match := ALONE.fullmatch(line["what"])) is not None:
            kinds = alone.setdefault(match[1], {})
            kind = "values" if match[2] == "values" else "gradients"
            kinds[kind] = max(line, kinds.get(kind, line), key=lambda line: line["error"])
        elif re.match(WHOLE, line["what"]):
            others.append(f"| {line['what']} | {_error(line)} | {_limit(line)} |")
    if not alone:
        return ""
    head = (
        "| a document in a packed row against the document alone | values | limit | worst gradient "
        "| limit |"
    )
    lines = [head, "|---" * 5 + "|"]
    for name, kinds in alone.items():
        cells = [f(kinds.get(kind)) for kind in ("values", "gradients") for f in (_error, _limit)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if others:
        lines += ["", "| whole models | error | limit |", "|---|---|---|", *others]
    counts = ", ".join(
        f"{result['tests'].get(name, 0)} {name}" for name in ("passed", "failed", "skipped")
    )
    return "\n".join(lines) + f"\n\nGPU tests: {counts}.\n"


def _error(line: dict[str, Any] | None) -> str:
    return "" if line is None else f"{line['error']:.1e}" if line["error"] else "0"


def _limit(line: dict[str, Any] | None) -> str:
    if line is None or line["limit"] is None:
        return ""
    # some are measured
    return f"{line['limit']:.1e}".replace(".0e", "e") if line["limit"] else "0"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw real tokens/s and peak memory of the first table's rows, as one small PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    found = chosen(result)
    bars = [(title, side, row) for title, cells in found for side, row in cells.items()]
    # a gap between workloads
    groups = [title for title, _, _ in bars]
    places = [place + 0.8 * len(set(groups[: place + 1])) for place in range(len(bars))]
    height = 1.1 + 0.21 * len(bars) + 0.15 * len(found)
    figure, sides = pyplot.subplots(1, 2, figsize=(11, height), sharey=True)
    for axes, (key, title) in zip(sides, BARS.items()):
        numbers = [row.get(key, 0) if "ms" in row else 0 for _, _, row in bars]
        drawn = axes.barh(places, numbers, color=[COLOURS[side] for _, side, _ in bars])
        texts = [f"{number:,.0f}" if number else "out of memory" for number in numbers]
        axes.bar_label(drawn, texts, fontsize=7, padding=2)
        axes.set_title(title, fontsize=9, loc="left")
        axes.set(xticks=[], frame_on=False)
        axes.tick_params(length=0, labelsize=8)
        axes.margins(x=0.15, y=0.01)
    middles = {
        title: sum(place for place, group in zip(places, groups) if group == title)
        / groups.count(title)
        for title, _ in found
    }
    names = [fill(title.replace("`", ""), 42) for title in middles]
    sides[0].set_yticks(list(middles.values()), names)
    sides[0].invert_yaxis()
    shown = sides_of(found)
    handles = [Patch(color=COLOURS[side], label=side) for side in shown]
    dates = _each(about(result, row.get("run", 1))["date"] for _, _, row in bars)
    figure.suptitle(f"One training step in bf16, one {result['machine']}, {dates}", fontsize=10)
    figure.legend(
        handles=handles, ncols=len(handles), loc="lower center", fontsize=8, frameon=False
    )
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
