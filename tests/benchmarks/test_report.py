"""The pages' GPU tables say what the result says; runs anywhere."""

from __future__ import annotations

import json
import re

import pytest

from tests.benchmarks import (
    report,
    run_all,
)

RESULT = {
    "machine": "NVIDIA Test",
    "date": "2026-01-02",
    "versions": {"torch": "2.11.0", "triton": "3.6.0"},
    "rows": [
        {
            "workload": "2b-32k-packed",
            "variant": "packfree+liger",
            "ms": 500.0,
            "real_tokens_per_s": 65536.0,
            "peak_gib": 60.0,
            "documents": 58,
            "layers": 24,
        },
        {
            "workload": "2b-32k-packed",
            "variant": "unpatched packed",
            "ms": 2000.0,
            "real_tokens_per_s": 16384.0,
            "peak_gib": 127.8,
        },
        {
            "workload": "2b-32k-packed",
            "variant": "matrix products alone",
            "ms": 400.0,
            "real_tokens_per_s": 81920.0,
            "sustained_ms": 440.0,
        },
        {"workload": "2b-32k-packed", "variant": "late", "skipped": "after 9 minutes"},
        {
            "workload": "9b-32k-packed",
            "variant": "unpatched packed",
            "error": "OutOfMemoryError: CUDA out of memory",
        },
        {
            "workload": "2b-8x2048-padded",
            "variant": "unpatched padded",
            "ms": 400.0,
            "real_tokens_per_s": 14000.0,
            "peak_gib": 50.0,
            "input_format": "padded",
            "real_tokens": 5600,
            "tokens": 16384,
            "documents": 8,
            "layers": 24,
        },
        {
            "workload": "2b-8layers-4k",
            "variant": "documents of 64",
            "ms": 1.0,
            "real_tokens_per_s": 4096000.0,
            "peak_gib": 1.0,
        },
        {
            "workload": "2b-8layers-4k",
            "variant": "one document",
            "ms": 1.0,
            "real_tokens_per_s": 4095000.0,
            "peak_gib": 1.0,
        },
        {
            "workload": "2b-8layers-32k",
            "variant": "documents of 64",
            "ms": 8.0,
            "real_tokens_per_s": 4096000.0,
            "peak_gib": 9.0,
        },
    ],
    "errors": [
        {
            "test": "a",
            "what": "trunk, fla: values, packed against alone",
            "error": 0.0,
            "limit": 0.0,
        },
        {
            "test": "a",
            "what": "trunk, fla: gradient of x, packed against alone",
            "error": 1e-6,
            "limit": 5e-3,
        },
        {
            "test": "a",
            "what": "trunk, fla: gradient of w, packed against alone",
            "error": 2e-3,
            "limit": 5e-3,
        },
        {
            "test": "c",
            "what": "trunk, auto: decays' gradients, packed against alone",
            "error": 1e-3,
            "limit": None,
        },
        {
            "test": "d",
            "what": "logits bf16: packed against upstream per document",
            "error": 3e-3,
            "limit": 1e-2,
        },
        {
            "test": "b",
            "what": "trunk, auto: gradient of x against fp64",
            "error": 1e-3,
            "limit": 1e-2,
        },
    ],
    "tests": {"passed": 3, "failed": 1, "skipped": 2, "not_passed": []},
}


ABLATION = [
    {"machine": "NVIDIA Test", "date": "2026-01-03"},
    {"workload": "w", "off": "nothing", "ms": 10.0, "ratio": 1.0, "ratio_of_best": 1.0},
    {"workload": "w", "off": "launcher", "ms": 11.0, "ratio": 1.1, "ratio_of_best": 1.05},
    {"workload": "v", "off": "nothing", "ms": 5.0, "ratio": 1.0, "ratio_of_best": 1.0},
    {"workload": "v", "off": "attention", "ms": 6.0, "ratio": 1.2, "ratio_of_best": 1.15},
]


@pytest.fixture
def results(tmp_path):
    """Files of a full result and of an ablation."""
    full, ablated = tmp_path / "2026-01-02-gpu.json", tmp_path / "2026-01-03-gpu-ablation.jsonl"
    full.write_text(json.dumps(RESULT))
    ablated.write_text("".join(json.dumps(line) + "\n" for line in ABLATION))
    return full, ablated


def test_tables(results):
    lines = "\n".join(report.tables(results[0], [results[1]]).values()).splitlines()
    assert "Made on 2026-01-02 on one NVIDIA Test with torch 2.11.0, triton 3.6.0" in "\n".join(
        lines
    )
    assert "| **2B shape, 32,768 tokens in 58 documents** | | | | | | |" in lines
    assert "| packfree+liger | 500 | 65,536 | 60.0 | 546 | 4.00 x | 1.25 |" in lines
    assert "| unpatched packed | 2,000 | 16,384 | 127.8 | 256 | 1.00 x | 5.00 |" in lines
    assert "| matrix products alone | 400 | 81,920 |  |  |  | 1.00 |" in lines
    assert "| matrix products alone, step after step | 440 | 74,473 |  |  |  | 1.10 |" in lines
    assert "| unpatched packed | out of memory | | | | | |" in lines
    assert "| **2B shape, 8 rows of 2,048 tokens, 34% of them real** | | | | | | |" in lines
    assert "| real tokens/s, 8 layers of the 2B shape | 4k | 32k |" in lines
    assert lines.index("| documents of 64 | 4,096,000 | 4,096,000 |") < lines.index(
        "| one document | 4,095,000 |  |"
    )
    assert (
        "| trunk, fla | 0 | 0 | 2.0e-03 | 5e-03 |" in lines
        and "| trunk, auto |  |  | 1.0e-03 |  |" in lines
    )
    assert "| logits bf16: packed against upstream per document | 3.0e-03 | 1e-02 |" in lines
    assert "GPU tests: 3 passed, 1 failed, 2 skipped." in lines
    assert not [line for line in lines if "late" in line or "fp64" in line]


def test_rows_are_sorted_and_what_failed_otherwise_than_for_memory_is_left_out():
    rows = [
        {"workload": "moe-32k-packed", "variant": "packfree+liger", "error": "ImportError: no"},
        {"workload": "moe-32k-packed", "variant": "unpatched packed", "error": "OutOfMemoryError"},
        *(
            {**RESULT["rows"][0], "variant": str(v), "real_tokens_per_s": v}
            for v in (1.0, 3.0, 2.0)
        ),
    ]
    table = report.steps({"rows": rows} | {"date": "d", "machine": "m", "versions": {}})
    assert "ImportError" not in table and table.count("| unpatched packed | out of memory |") == 1
    assert table.index("| 3.0 |") < table.index("| 2.0 |") < table.index("| 1.0 |")


def test_each_run_has_a_table_and_ratios_of_its_own():
    rows = [
        row | {"run": 2 - (row["variant"] == "matrix products alone")} for row in RESULT["rows"][:3]
    ]
    runs = {
        "1": {"date": "2025-12-31", "machine": "NVIDIA Old", "versions": {}, "source": "abc"},
        "2": {"date": "2026-01-02", "machine": "NVIDIA Test", "versions": {"torch": "2.11.0"}},
    }
    first, second = report.steps({"rows": rows, "runs": runs}).split("## 2025-12-31, NVIDIA Old")
    assert first.startswith("## 2026-01-02, NVIDIA Test") and "torch 2.11.0" in first
    assert "| packfree+liger | 500 | 65,536 | 60.0 | 546 | 4.00 x |  |" in first, (
        "its products were timed in another run"
    )
    assert "| matrix products alone | 400 | 81,920 |  |  |  | 1.00 |" in second
    assert "package of commit unknown (source abc)" in second


def test_a_table_of_two_runs_names_the_releases_of_both():
    runs = {
        "1": {"date": "2026-01-01", "machine": "NVIDIA Test", "versions": {"torch": "2.10.0"}},
        "2": {"date": "2026-01-02", "machine": "NVIDIA Test", "versions": {"torch": "2.11.0"}},
    }
    rows = [row | {"run": 2} for row in RESULT["rows"][:2]]
    rows += [row | {"workload": "2b-64k-packed", "run": 1} for row in RESULT["rows"][:2]]
    assert (
        "Made on 2026-01-02 and 2026-01-01 in 2 runs, each on one NVIDIA Test with torch 2.11.0 and "
        "2.10.0;"
    ) in report.head({"rows": rows, "runs": runs}, "x.json")
    layer = RESULT["rows"][0] | {"workload": "layer conv", "run": 1}
    assert report.operations({"rows": [layer], "runs": runs}).startswith(
        "Made on 2026-01-01 on one NVIDIA Test with torch 2.10.0:\n\n| forward"
    )


def test_each_row_of_the_first_table_is_of_its_newest_run_alone():
    rows = [
        *RESULT["rows"][:2],
        RESULT["rows"][0] | {"workload": "2b-64k-packed", "variant": "packfree", "run": 2},
        RESULT["rows"][1] | {"workload": "2b-64k-packed", "run": 2},
        RESULT["rows"][1] | {"workload": "2b-64k-packed", "variant": "Unsloth", "run": 1},
    ]
    assert report.top({"rows": rows}).splitlines() == [
        "| one training step | transformers, packed | packfree |",
        "|---|---|---|",
        "| 2B shape, 32,768 tokens in 58 documents | 2,000 ms, 128 GiB | 500 ms, 60 GiB |",
        "| 2B shape, 65,536 tokens | 2,000 ms, 128 GiB | 500 ms, 60 GiB |",
    ]


def test_operations_are_listed_by_speed():
    row = {"workload": "layer conv", "peak_gib": 1.0}
    facts = {"torch": {"ms": 9.0}, "triton": {"ms": 0.5}, "fla": {"error": "x"}}
    facts[report.GONE[0]] = {"ms": 0.1}
    rows = [row | {"variant": name} | found for name, found in facts.items()]
    lines = report.operations(RESULT | {"rows": rows}).splitlines()
    assert lines[4:] == ["| conv | `triton` 0.50 ms, 1.00 GiB; `torch` 9.00 ms, 1.00 GiB |"]
    assert not report.operations({"rows": []})


def test_readme_s_table_is_short_and_fair():
    """The best that a user could have instead stands beside it; what was not timed is left out."""
    ours = RESULT["rows"][0] | {"variant": "packfree"}
    composed = ours | {"variant": "composed without packfree", "ms": 600.0}
    theirs = ours | {"variant": "unsloth", "ms": 700.0}
    lines = report.summary({"rows": [*RESULT["rows"], ours, composed, theirs]}).splitlines()
    start = "| 2B shape, 32,768 tokens in 58 documents | 2,000 ms, 128 GiB (4.0 x) |"
    beside = "600 ms, 60 GiB (1.2 x) | 700 ms, 60 GiB (1.4 x)"
    assert lines[2:] == [f"{start} {beside} | 500 ms, 60 GiB |"]
    assert report.summary({"rows": [*RESULT["rows"], ours]}).splitlines()[2:] == [
        f"{start}  |  | 500 ms, 60 GiB |"
    ]


def test_readme_s_table_marks_what_was_not_timed_in_one_run():
    rows = [*RESULT["rows"], RESULT["rows"][0] | {"variant": "packfree", "run": 2}]
    assert "(4.0 x *)" in report.summary({"rows": rows}).splitlines()[2]


@pytest.mark.parametrize(
    "row, cell",
    [
        ({"error": "OutOfMemoryError: 9 GiB"}, "out of memory"),
        ({"skipped": "late"}, "not measured"),
    ],
)
def test_readme_s_table_says_why_a_row_has_no_time(row, cell):
    names = {"workload": "2b-32k-packed", "documents": 58}
    stock, ours = (
        names | {"variant": "unpatched packed"} | row,
        names | {"variant": "packfree", "ms": 500.0, "peak_gib": 60.0},
    )
    line = report.summary({"rows": [stock, ours]}).splitlines()[2]
    assert line == f"| 2B shape, 32,768 tokens in 58 documents | {cell} |  |  | 500 ms, 60 GiB |"


def test_an_ablation_is_a_table_of_ratios(results):
    lines = report.ablation(results[1]).splitlines()
    assert (
        "on 2026-01-03 on one NVIDIA Test" in lines[0]
        and "2026-01-03-gpu-ablation.jsonl" in lines[0]
    )
    assert lines[2:] == [
        "| without | launcher | attention |",
        "|---|---|---|",
        "| w | 1.100 (1.050) |  |",
        "| v |  | 1.200 (1.150) |",
    ]


def test_the_pages_get_the_newest_result(tmp_path, results):
    (tmp_path / "2026-01-01-gpu.json").write_text(json.dumps(RESULT))
    assert report.newest(tmp_path) == results[0]
    found = report.every_table(results[0], [results[1]])
    wanted = dict[str, str]()
    for (page, mark), text in found.items():
        (tmp_path / page).parent.mkdir(exist_ok=True)
        with (tmp_path / page).open("a") as file:
            file.write(f"before\n<!-- {mark} -->\nold\n<!-- /{mark} -->\nafter\n")
        wanted[page] = (
            wanted.get(page, "") + f"before\n<!-- {mark} -->\n{text}<!-- /{mark} -->\nafter\n"
        )
    # writing again changes nothing
    for _ in range(2):
        report.main(
            ["--result", str(results[0]), "--ablation", str(results[1]), "--write", str(tmp_path)]
        )
        assert {page: (tmp_path / page).read_text() for page in wanted} == wanted
    assert 1_000 < (tmp_path / report.PLOT).stat().st_size < 100_000


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="`<!-- gpu -->` .* wanted one"):
        report.put_in("no marks", "gpu", "text")


def test_a_result_names_its_commit(monkeypatch):
    assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?|unknown", run_all.commit())
    # a copy of the tree on a machine without git
    monkeypatch.setattr(run_all, "which", lambda program: None)
    assert run_all.commit() == "unknown"


def test_calls_are_assembled(tmp_path):
    first, second = tmp_path / "1", tmp_path / "2"
    lines = {
        first: [
            {"workload": "w", "variant": "a", "ms": 1.0},
            {"workload": "w", "variant": "b", "ms": 2.0},
        ],
        second: [
            {"workload": "w", "variant": "a", "ms": 3.0},
            {"workload": "w", "variant": "b", "skipped": "late"},
        ],
    }
    for folder, rows in lines.items():
        folder.mkdir()
        (folder / "rows.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows) + '{"cut": '
        )
        (folder / "machine.json").write_text(
            '{"machine": "GPU 1", "date": "2026-01-02", "versions": {}}'
        )
    (second / "tests.jsonl").write_text(
        '{"test": "t", "outcome": "failed", "s": 1, "reason": "r"}\n'
    )
    (first / "files.jsonl").write_text(
        '{"file": "a", "end": "passed"}\n{"file": "b", "end": "out of time"}\n'
    )
    path = run_all.main(["--out", str(tmp_path), "--assemble", str(first), str(second)])
    assert path.name == "2026-01-02-gpu-1.json"
    found = json.loads(path.read_text())
    assert [(row["variant"], row["ms"], row["run"]) for row in found["rows"]] == [
        ("a", 3.0, 2),
        ("b", 2.0, 1),
    ]
    assert found["tests"] == {
        "passed": 0,
        "failed": 1,
        "skipped": 0,
        "not_passed": [{"test": "t", "outcome": "failed", "reason": "r"}],
        "files": {"a": "passed", "b": "out of time"},
    }
    assert not run_all.ended_well(path)
    # again, with more time
    (second / "files.jsonl").write_text('{"file": "b", "end": "passed"}\n')
    assert run_all.ended_well(
        run_all.main(["--out", str(tmp_path), "--assemble", str(first), str(second)])
    )


def test_a_file_that_does_not_end_well_leaves_a_trace(tmp_path, monkeypatch):
    """One that fails at import reports no test at all."""
    ends = dict(zip(("gpu/a.py", "gpu/b.py", "integrations/c.py"), (0, 2, None)))
    monkeypatch.setattr(run_all, "run", lambda command, *_, **__: ends.get(command[3][6:], ""))
    path = run_all.main(["--out", str(tmp_path), "--no-rows", "--tests", *ends])
    found = json.loads(path.read_text())["tests"]["files"]
    assert found == {
        "gpu/a.py": "passed",
        "gpu/b.py": "interrupted",
        "integrations/c.py": "out of time",
    }
    assert not run_all.ended_well(path)


def test_one_script_runs_every_file_that_needs_a_gpu():
    folder = run_all.ROOT / "tests"
    marked = re.compile(r"^(pytestmark = .*\bgpu\b|@pytest\.mark\.gpu\b)", re.M)
    files = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("test_*.py")
        if marked.search(path.read_text())
    }
    assert set(run_all.TESTS) == files


def test_a_result_names_no_folder_of_the_machine(tmp_path):
    row = {
        "workload": "w",
        "variant": "v",
        "error": "ImportError: (/home/somebody/site/package/part/file.py), 5 tokens/s",
    }
    path = run_all.write(RESULT | {"rows": [row]}, tmp_path)
    assert (
        json.loads(path.read_text())["rows"][0]["error"]
        == "ImportError: (part/file.py), 5 tokens/s"
    )
