"""The trees that are timed have the sizes that are asked for, and the attention that stands beside
ours reads the same paths.
"""

from __future__ import annotations

import json
import weakref

import pytest
import torch

from hf_packfree.ops.attention import attention
from tests.benchmarks import prefix_report, prefixes
from tests.benchmarks.prefixes import attend, group, packed, shared, turns, words_of_trl
from tests.benchmarks.shapes import SHAPES
from tests.benchmarks.timing import Clock, Results


def test_rows_hold_prefixes_once_and_every_sample_whole():
    for samples, once, whole in (
        (group(2048, 16, 512, 1000), 10_240, 40_960),
        (turns(3, 4, 300, 1000), 6_300, 14_400),
    ):
        rows = shared(samples, "cpu"), packed(samples, "cpu")
        assert [row.input_ids.shape[1] for row in rows] == [once, whole]
        for row in rows:
            assert all(
                torch.equal(row.input_ids[0, places], sample)
                for places, sample in zip(row.index, samples, strict=True)
            )
            # weights of the loss: every sample's tokens but its first
            counted = row.counts * (row.before >= 0)
            assert counted.sum() == whole - len(samples)
            assert torch.equal(row.before[0, row.index[-1][1:]], row.index[-1][:-1])


def test_attention_beside_ours_reads_the_same_paths():
    row = shared(turns(3, 2, 9, 1000), "cpu")
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(1, row.input_ids.shape[1], heads, 8, generator=generator) for heads in (4, 2, 2)
    )
    turned = (x.transpose(1, 2) for x in (q, k, v))
    found, _ = attend(None, *turned, None, scaling=8**-0.5, **words_of_trl(row))
    torch.testing.assert_close(found, attention(q, k, v, row.packed_sequence))


@pytest.mark.slow
def test_graphs_are_timed_when_the_models_of_the_comparison_are_freed(tmp_path, monkeypatch):
    models, in_memory, add = [], [], prefixes.Held.add

    def watched(held, name, variant):
        in_memory.append([who for who, model in models if model() is not None])
        add(held, name, variant)
        models.append((name, weakref.ref(held.models[name])))

    monkeypatch.setattr(prefixes.Held, "add", watched)
    results = Results(tmp_path / "prefixes.jsonl", only=r"tree(, no graphs|, CUDA graphs)?$")
    samples = {"2b-multiturn": turns(3, 2, 9, 100)}
    prefixes.measure(SHAPES["tiny"], samples, results, Clock("cpu", warmup=0, runs=1))
    names = [name for name, _ in models]
    assert names[0] == names[-2] == "packfree tree" and names[-1] == "packfree tree, CUDA graphs"
    assert in_memory[-2:] == [[], ["packfree tree"]]
    timed = {row["variant"]: row for row in results.rows if "ms" in row}
    assert list(timed) == [
        "packfree tree",
        "packfree tree, no graphs",
        "packfree tree, CUDA graphs",
    ]
    assert timed["packfree tree, no graphs"]["times_as_long"] == 1.0
    assert len({row["loss"] for row in timed.values()}) == 1


def test_the_newest_result_becomes_a_table(tmp_path):
    about = {"workload": "machine", "machine": "NVIDIA Test", "date": "2026-01-02", "versions": {}}
    timed = {"ms": 313.94, "peak_gib": 37.919, "tokens": 10240, "times_as_long": 1.0}
    rows = [
        {"workload": "2b-group16", "variant": "packfree tree", **timed},
        {"workload": "2b-group16", "variant": "packfree packed", "error": "OutOfMemoryError: CUDA"},
    ]
    for day in (1, 2):
        path = tmp_path / f"2026-01-0{day}-nvidia-test.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in [about, *rows[:day]]))
    (text,) = prefix_report.tables(prefix_report.newest(tmp_path)).values()
    assert "Made on 2026-01-02 on one NVIDIA Test" in text and path.name in text
    assert "| packfree tree | 10,240 | 313.9 | 37.9 | 1.00 |" in text
    assert "| packfree packed | | out of memory | | |" in text
