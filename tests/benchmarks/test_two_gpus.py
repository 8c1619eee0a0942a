"""What is run on two GPUs: parts choose the rows that they are named after, end within their time,
and their results become the tables of docs/parallel.md.
"""

from __future__ import annotations

import json
import sys

import pytest

from tests.benchmarks import context_parallel, context_parallel_report, two_gpus
from tests.benchmarks.context_parallel_cases import cases
from tests.benchmarks.context_parallel_ranks import Bench, done_by_all
from tests.benchmarks.timing import Clock, asks_for

ABOUT = {
    "workload": "machine",
    "variant": "",
    "machine": "NVIDIA H100 80GB HBM3",
    "processor": "a processor",
    "date": "2026-11-25",
    "versions": {"torch": "2.11.0", "transformers": "5.24.0"},
}


def part(name):
    """Return the part of that name."""
    return next(part for part in two_gpus.PARTS if part.name == name)


def chosen(name):
    """Return the names of the rows that a part measures on two GPUs, by what `--only` and
    `--ways` ask for.
    """
    arguments = part(name).arguments
    only, ways = (arguments[arguments.index(word) + 1] for word in ("--only", "--ways"))
    bench = Bench(Clock("cpu"), "auto", (ways,))
    rows = (
        (f"{case.name}-cp{row.world}", row.variant)
        for case in cases(tiny=True)
        for row in context_parallel.rows_of(bench, case, [2])
    )
    return [" ".join(row) for row in rows if asks_for(only, *row)]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "64k",
            [
                "2b-64k-cp1 8k documents",
                "2b-64k-cp2 8k documents, state",
                "2b-64k-cp1 one document",
                "2b-64k-cp2 one document, state",
                "9b-64k-cp1 8k documents",
                "9b-64k-cp2 8k documents, state",
                "9b-64k-cp2 8k documents, state, predicted",
                "9b-64k-cp1 one document",
                "9b-64k-cp2 one document, state",
                "9b-64k-cp2 one document, state, predicted",
            ],
        ),
        (
            "128k-256k",
            [
                "9b-128k-cp1 8k documents",
                "9b-128k-cp2 8k documents, state",
                "9b-128k-cp1 one document",
                "9b-128k-cp2 one document, state",
                "2b-256k-cp1 8k documents",
                "2b-256k-cp2 8k documents, state",
            ],
        ),
        ("fla", ["2b-64k-cp2 8k documents, fla", "9b-64k-cp2 8k documents, fla"]),
        ("256k-one-document", ["2b-256k-cp1 one document", "2b-256k-cp2 one document, state"]),
    ],
)
def test_a_part_runs_the_rows_that_it_is_named_after(monkeypatch, name, wanted):
    monkeypatch.setattr(Bench, "ranks", 2)
    monkeypatch.setattr(context_parallel, "find_spec", lambda package: True)
    assert chosen(name) == wanted


def test_a_small_gpu_recomputes_rows_of_64k_tokens_and_says_so():
    large, small = cases(tiny=False), cases(tiny=False, small=True)
    assert {case.facts()["recomputed"] for case in large if "64k" in case.name} == {False}
    assert [c.documents for c in small if not c.checkpointing] == [
        "8k documents, nothing recomputed"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "end"),
    [
        ("pass", "done"),
        ("raise SystemExit(17)", "exit status 17"),
        ("import time; time.sleep(60)", "out of time"),
    ],
)
def test_a_part_ends_in_its_time_and_says_how(program, end):
    assert (
        two_gpus._ended([sys.executable, "-c", program], seconds=5 if end == "done" else 2) == end
    )


def test_ranks_go_on_behind_rows_that_any_of_them_failed_in(tmp_path):
    rows = {
        "": [{"workload": "a", "variant": "1", "ms": 1.0}, {"workload": "a", "variant": "2"}],
        "rank1": [{"workload": "b", "variant": "1", "ms": 1.0}]
        + [{"workload": "c", "variant": "1", "error": "OutOfMemoryError: "}],
    }
    for folder, lines in rows.items():
        (tmp_path / folder).mkdir(exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / folder / "fsdp2.jsonl").write_text(text)
    assert done_by_all(tmp_path, "fsdp2") == {("a", "1"), ("a", "2"), ("c", "1")}


@pytest.fixture
def results(tmp_path):
    """Rows as the scripts write them, kept under their dates."""
    timed = {"ms": 700.0, "peak_gib": 60.0}
    exchanges = {"workload": "exchanges", "variant": "2 ranks", "rate": 3e11, "latency_s": 3e-5}
    shape = {"tokens": 65536, "recomputed": True}
    files = {
        "context_parallel": [
            exchanges,
            {"workload": "9b-64k-cp1", "variant": "8k documents", "error": "OutOfMemoryError: "},
            {"workload": "9b-64k-cp2", "variant": "8k documents, fla", **timed, **shape},
            {"workload": "2b-64k-cp2", "variant": "8k documents, state", **timed},
            {"workload": "2b-64k-cp2", "variant": "8k documents, state, predicted"}
            | {"ms": 693.0, "peak_gib": 60.0},
            {
                "workload": "gradients",
                "variant": "documents, state",
                "tokens": 8192,
                "all": 0.012,
                "worst": 0.034,
            },
        ],
        "fsdp2": [
            {"workload": "2b-32k-fsdp2", "variant": "packfree", **timed},
            {
                "workload": "2b-32k-fsdp2",
                "variant": "unpatched packed",
                "error": "OutOfMemoryError",
            },
            {
                "workload": "2b-32k-lora-fsdp2",
                "variant": "packfree, wrapped: frozen weights whole",
                **timed,
            },
            {"workload": "2b-8k-ddp", "variant": "packfree", **timed},
            {"workload": "2b-8k-ddp", "variant": "packfree, no graphs", "ms": 800.0}
            | {"peak_gib": 50.0},
        ],
        "context_parallel_trainer": [
            {
                "workload": "2b-64k-trainer-lora",
                "variant": f"{way} over two GPUs, FSDP2",
                "losses": [12.5, loss],
                **timed,
            }
            for way, loss in (("context parallelism", 12.25), ("data parallelism", 12.2503))
        ],
        "context_parallel_curves": [
            {"workload": "curves", "variant": "one GPU", "micronats": [5_000_000, 4_000_000]}
            | {"tokens": 32768, "layers": 4},
            {"workload": "curves", "variant": "two GPUs", "micronats": [5_000_000, 4_000_700]},
        ],
    }
    for name, lines in files.items():
        text = "".join(json.dumps(line) + "\n" for line in [ABOUT, *lines])
        (tmp_path / f"{name}.jsonl").write_text(text)
    kept = two_gpus.keep(tmp_path, tmp_path / "kept")
    assert len(kept) == 4 and all(p.name.startswith("2026-11-25-nvidia-h100-x2-") for p in kept)
    return tmp_path / "kept"


@pytest.mark.parametrize(
    ("mark", "line"),
    [
        (
            "two-gpus",
            "| 9B shape (8 layers), 65,536 tokens, layers recomputed, 8k documents | out of memory "
            "| 700 ms, 60 GiB |",
        ),
        ("two-gpus-gradients", "| documents, state | 8,192 | 1.20e-02 | 3.40e-02 |"),
        ("two-gpus-trainer", "| LoRA | 700 ms, 60 GiB | 700 ms, 60 GiB |"),
        ("two-gpus-curves", "in the mean: two GPUs 0.0003, 0.0007 at most."),
    ],
)
def test_results_become_tables(results, mark, line):
    found = context_parallel_report.every(results)[mark]
    assert line in found and "Two NVIDIA H100 80GB HBM3 of one host" in found


@pytest.mark.parametrize(
    "lines",
    [
        "| Full training, 32,768 tokens a rank | transformers, packed | packfree |\n|---|---|---|\n"
        "| H100s, 2026-11-25 | out of memory | 700 ms, 60 GiB |",
        "| LoRA r=16, 32,768 tokens a rank | frozen weights whole |\n|---|---|\n"
        "| H100s, 2026-11-25 | 700 ms, 60 GiB |",
        "| DDP over two, autocast, H100s, 2026-11-25 | packfree, with CUDA graphs | the backward",
        # whose memory is not that of a graph
        "| full training, 8,192 tokens a rank | 700 ms |  | 800 ms |  |",
    ],
)
def test_steps_under_fsdp2_have_a_table_a_workload_and_a_line_a_run(results, lines):
    found = context_parallel_report.every(results)["two-gpus-fsdp2"]
    assert lines in found and "8,192 tokens a rank | packfree" not in found


def test_runs_under_fsdp2_come_in_their_order(results):
    first = results / "2026-11-25-nvidia-h100-x2-fsdp2.jsonl"
    for name in (
        "2026-11-25-nvidia-h100-x2-fsdp2-10.jsonl",
        "2026-11-24-nvidia-h100-x2-fsdp2.jsonl",
    ):
        (results / name).write_text(first.read_text())
    (results / "2026-11-25-nvidia-h100-x2-fsdp2-2.jsonl").write_text(first.read_text())
    found = context_parallel_report.every(results)["two-gpus-fsdp2"].splitlines()
    runs = ["2026-11-24", "2026-11-25", "2026-11-25 (2)", "2026-11-25 (10)"]
    assert [line.split(" | ")[0] for line in found[2:6]] == [f"| H100s, {run}" for run in runs]


def test_what_one_gpu_predicts_of_more(results):
    """Beside how far it was off of two, of those rows that were measured, too."""
    assert context_parallel_report.every(results)["two-gpus-predicted"] == ""
    rows = [
        {"workload": "2b-64k-cp1", "variant": "8k documents", "ms": 1400.0, "peak_gib": 99.0}
        | {"tokens": 65536, "recomputed": True},
        {"workload": "2b-64k-cp8", "variant": "8k documents, state, predicted", "ms": 222.0}
        | {"peak_gib": 20.0, "efficiency": 0.788},
    ]
    text = "".join(json.dumps(line) + "\n" for line in [ABOUT, *rows])
    (results / "2026-11-25-nvidia-h100-predicted.jsonl").write_text(text)
    found = context_parallel_report.every(results)["two-gpus-predicted"]
    assert "such predictions of two GPUs, 1, were -1.0% to -1.0% off" in found
    assert "| one GPU, measured | 8 GPUs, predicted |" in found
    title = "2B shape, 65,536 tokens, layers recomputed, 8k documents"
    assert f"| {title} | 1,400 ms, 99 GiB | 222 ms, 20 GiB, " in found
    assert "efficiency 0.788 |" in found
