"""Lines of the comparison with Unsloth become rows that the tables know."""

from __future__ import annotations

import json

from tests.benchmarks import report
from tests.benchmarks.timing import read_lines
from tests.benchmarks.unsloth import EAGER, WORKLOADS, main


def line(job, row, precision="amp", gpu="NVIDIA Test", **facts):
    return {"job": job, "gpu": gpu, "row": row, "precision": precision} | facts


def timed(ms):
    facts = {"ms": ms, "tok_s": 8.192e6 / ms, "real_tokens": 8192, "documents": 16}
    return facts | {"peak_gib": 20.0, "loss": 12.8, "packing": ""}


def test_rows_of_the_last_gpu_with_their_versions(tmp_path):
    lines = [
        line("unsloth", "8k", gpu="NVIDIA Other", **timed(1.0)),
        line("unsloth", "versions", "", torch="2.11.0", unsloth="2026.10.9", gc="off"),
        line("unsloth", "8k", **timed(300.0)),
        line("unsloth", "8k", **timed(224.0)),
        line("unsloth", "8k", "bf16", **timed(257.0)),
        line("unsloth", "32k", error="OutOfMemoryError"),
        line("unsloth-gc", "8k", **timed(400.0)),
        line("packfree", "8k", **timed(158.0)),
    ]
    (tmp_path / "lines").write_text("".join(json.dumps(one) + "\n" for one in lines))
    main(["--lines", str(tmp_path / "lines"), "--out", str(tmp_path)])
    theirs, ours = read_lines(tmp_path / "rows.jsonl")
    assert (theirs["workload"], theirs["variant"]) == ("2b-8k-lora-autocast", "unsloth")
    assert theirs["ms"] == 224 and theirs["peak_gib"] == 20 and theirs["note"] == EAGER
    assert theirs["versions"] == {"torch": "2.11.0", "unsloth": "2026.10.9"}
    assert ours["variant"] == "packfree, beside unsloth" and ours["ms"] == 158
    assert set(WORKLOADS.values()) <= report.TITLES.keys()


def test_a_table_shows_unsloth_beside_us(tmp_path):
    (tmp_path / "lines").write_text(json.dumps(line("unsloth", "32k", **timed(708.0))) + "\n")
    main(["--lines", str(tmp_path / "lines"), "--out", str(tmp_path)])
    (row,) = read_lines(tmp_path / "rows.jsonl")
    result = {"rows": [row, row | {"variant": "packfree", "ms": 517.0}]}
    ((_, beside),) = report.chosen(result)
    assert {side: found["ms"] for side, found in beside.items()} == {
        "Unsloth": 708,
        "packfree": 517,
    }
