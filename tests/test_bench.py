"""The benchmark: peaks that are known beforehand, and the whole of it on a tiny model."""

from __future__ import annotations

import json
import math
import re
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_packfree.bench import (
    PRESETS,
    BenchOptions,
    BenchReport,
    Candidate,
    choose_lengths,
    run_bench,
    shapes,
    turns,
)
from hf_packfree.bench.lengths import documents_of, packed, padded
from hf_packfree.bench.measure import MIB, Floor, name_of, peak_mib, threads
from hf_packfree.bench.shapes import config_of
from hf_packfree.cli import commands, main
from tests.graphs import on_cpu
from tests.support import runner_of, tiny

CPU = torch.device("cpu")
WAYS = ("unpatched", "patched")


def test_both_batches_hold_the_same_documents_and_targets():
    documents = documents_of((3, 1, 5), 50, seed=1)
    rows, row = padded(documents, CPU), packed(documents, CPU)
    assert rows["input_ids"].shape == (3, 5) and row["input_ids"].shape == (1, 9)
    assert torch.equal(rows["input_ids"][rows["attention_mask"].bool()], row["input_ids"][0])
    assert (rows["labels"][:, 1:] != -100).sum() == (row["labels"] != -100).sum() == 6
    assert row["cu_seq_lens_q"].tolist() == [0, 3, 4, 9] and row["max_length_q"] == 5


def test_peak_memory_of_a_known_step(capfd):
    def step():
        a = torch.ones(3 * MIB // 4)
        # both are held: 6 MiB
        b = a + 1
        del a
        # 6 MiB again
        return (b + 1).sum()

    assert peak_mib(step, CPU) == pytest.approx(6, abs=0.01)
    assert capfd.readouterr() == ("", "")


def test_what_graphs_keep_is_counted_and_ordinary_memory_is_not(monkeypatch):
    segments = [
        {"total_size": 3 * MIB, "segment_pool_id": (0, 0)},
        {"total_size": 5 * MIB, "segment_pool_id": (0, 1)},
        {"total_size": 7 * MIB, "segment_pool_id": (2, 0)},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 2 * MIB)
    gpu = torch.device("cuda")
    assert peak_mib(lambda: None, gpu, has_graphs=True) == 12
    assert peak_mib(lambda: None, gpu) == 0
    assert peak_mib(lambda: None, CPU, has_graphs=True) == 0


@pytest.mark.slow
def test_patched_steps_replay_graphs_and_unpatched_ones_do_not(tmp_path, monkeypatch):
    """Patches are lifted and put on again between them, which is no change to a graph."""
    on_cpu.let_capture_whole_documents(monkeypatch)
    models = []
    patch = turns.apply_patches
    monkeypatch.setattr(
        turns,
        "apply_patches",
        lambda *args, **options: models.append(patch(*args, **options)) or models[-1],
    )
    tiny().save_pretrained(tmp_path)
    run_bench(BenchOptions(str(tmp_path), (40, 30), rounds=2, threads=1))
    (model,) = models
    runner = runner_of(model)
    # of two candidates and four rounds, the first step alone runs without
    assert runner.replayed == 7 and sum(runner.reasons.values()) == 1


def test_the_peak_of_a_gpu_is_that_gpus(monkeypatch):
    asked = []
    for name in (
        "synchronize",
        "reset_peak_memory_stats",
        "memory_allocated",
        "max_memory_allocated",
    ):
        held = 5 * MIB if name.startswith("max") else 2 * MIB
        monkeypatch.setattr(
            torch.cuda, name, lambda device, held=held: asked.append(device) or held
        )
    assert peak_mib(lambda: None, torch.device("cuda", 1)) == 3
    assert set(asked) == {torch.device("cuda", 1)}


def test_a_cpu_has_the_name_that_linux_gives_it(monkeypatch):
    facts = "processor\t: 0\nmodel name\t: AMD EPYC 9B14\n"
    monkeypatch.setattr(Path, "read_text", lambda path: facts)
    assert name_of(CPU) == f"AMD EPYC 9B14 (threads: {torch.get_num_threads()})"

    def missing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert name_of(CPU) == f"cpu (threads: {torch.get_num_threads()})"


def test_threads_are_as_before_afterwards():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise KeyError
    with threads(None):
        assert torch.get_num_threads() == before


@pytest.mark.parametrize("there", [True, False])
def test_a_gpu_is_timed_where_there_is_one(monkeypatch, there):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert commands._fastest() == ("cuda" if there else "cpu")


def test_a_shape_is_what_it_would_be_trained_in(monkeypatch):
    monkeypatch.setattr(
        shapes,
        "build_model",
        lambda config, device, dtype, **_: SimpleNamespace(train=lambda: dtype),
    )
    for device, asked, wanted in (
        ("cpu", None, "float32"),
        ("cuda", None, "bfloat16"),
        ("cuda", torch.float32, "float32"),
    ):
        assert shapes.model_of("small", torch.device(device), asked) == getattr(torch, wanted)
    assert shapes.model_of("qwen3_5", torch.device("cuda"), None) is None, "a checkpoint's own"


def test_the_floor_counts_every_linear_layer():
    linears = [torch.nn.Linear(8, 16), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)]
    model = torch.nn.Sequential(*linears, torch.nn.LayerNorm(8))
    floor = Floor(model, 10)
    floor._once = lambda fan_in, fan_out: {(8, 16): 1.0, (16, 8): 10.0}[fan_in, fan_out]
    assert floor.seconds() == 12.0
    with FlopCounterMode(display=False) as counter:
        Floor(torch.nn.Linear(256, 128), 64).seconds()
    assert counter.get_total_flops() == 3 * 2 * 64 * 256 * 128, (
        "forward, and the gradients of inputs and weights"
    )


def multiplied(model, tokens, choices):
    """Multiplications of the forward products in the floor."""
    floor = Floor(model, tokens, choices)
    floor._once = lambda fan_in, fan_out, experts=0: (
        math.prod(floor._sizes(fan_in, fan_out, experts)[0]) * fan_out
    )
    return floor.seconds()


def test_the_floor_counts_the_experts_that_tokens_choose():
    model = tiny("qwen3_5_moe")
    linears = sum(
        module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear)
    )
    # gate and up, and down
    layers, each = len(model.model.layers), 64 * 2 * 32 + 32 * 64
    assert multiplied(model, 10, 2) == 10 * (linears + 2 * layers * each)
    # two of four experts have no token
    assert multiplied(model, 1, 2) == linears + 2 * layers * each
    assert Floor(model, 10, 2).seconds() > 0


def test_a_benchmark_knows_how_many_experts_a_token_chooses(monkeypatch):
    class Asked(Exception):
        pass

    def floor(model, tokens, choices):
        raise Asked(tokens, choices)

    monkeypatch.setattr("hf_packfree.bench.turns.Floor", floor)
    for family, wanted in (("qwen3_5_moe", 2), ("qwen3_5", 1)):
        with pytest.raises(Asked) as asked:
            run_bench(BenchOptions(family, (3, 2), rounds=1, threads=1))
        assert asked.value.args == (5, wanted)


def report_of(*candidates, options=BenchOptions("small", (10, 30))):
    versions = {"torch": "2", "transformers": "5"}
    return BenchReport(
        options=options,
        model="M",
        parameters=7,
        device="cpu",
        dtype="float32",
        versions=versions,
        candidates=candidates,
        floor=0.5,
        memory="somehow",
    )


def test_ratios_and_sentence():
    report = report_of(
        Candidate("unpatched padded", 60, (3.0, 2.0, 90.0), 100.0),
        Candidate("unpatched packed", 40, refused="no kernels"),
        Candidate("patched padded", 60, (1.0,), 25.0),
    )
    assert (
        report.fill == 40 / 60
        and report.faster("patched padded") == 3.0
        and report.memory_share("patched padded") == 0.25
    )
    assert (
        report.tokens_per_second("patched padded") == 40
        and report.floor_share("patched padded") == 0.5
    )
    assert report.faster("unpatched packed") is report.memory_share("unpatched packed") is None
    sentence = "once patched, a padded step is 3.00 times as fast, in 25% of the peak memory"
    assert str(report) == f"M on cpu, 2 documents, 67% real tokens: {sentence}"
    packed = Candidate("unpatched packed", 40, (1.5,)), Candidate("patched packed", 40, (0.5,))
    both = report_of(report.candidates[0], report.candidates[2], *packed)
    assert str(both) == f"{report}; a packed one 3.00 times as fast as unpatched packed"
    rows = {row["name"]: row for row in report.as_dict()["candidates"]}
    assert (
        rows["unpatched packed"]["refused"] == "no kernels"
        and rows["unpatched padded"]["median_ms"] == 3000
    )


def test_what_did_not_run_is_said():
    full = Candidate("unpatched padded", 60, refused="out of memory")
    report = report_of(full, Candidate("patched padded", 60, (1.0,), 25.0))
    assert "unpatched padded did not run (out of memory)" in str(report)


@pytest.mark.slow
def test_a_tiny_model_measured_for_real():
    """One long document and many short ones: padding is nine tenths of the batch."""
    steps = []
    report = run_bench(
        BenchOptions("qwen3_5", (400, *[8] * 11), rounds=3, threads=1),
        lambda *step: steps.append(step),
    )
    assert [row.name for row in report.candidates] == [
        f"{how} {what}" for how in WAYS for what in ("padded", "packed")
    ]
    assert all(len(row.seconds) == 3 and row.refused is None for row in report.candidates)
    assert report.fill < 0.11 and [row.computed_tokens for row in report.candidates] == [
        4800,
        488,
        488,
        488,
    ]
    assert report.memory_share("patched padded") < 0.4
    ours = [report.candidate(f"patched {kind}").peak_mib for kind in ("padded", "packed")]
    assert ours[0] == pytest.approx(ours[1], rel=0.1)
    assert steps[0] == ("unpatched padded", 0, 20) and steps[-1] == ("done", 20, 20)
    assert report.floor > 0


def test_the_shapes_are_configurations():
    for name, (_, shape) in PRESETS.items():
        config = config_of(name)
        for part in ("text_config", "vision_config") if "text_config" in shape else (None,):
            given, made = (shape, config) if part is None else (shape[part], getattr(config, part))
            assert {key: getattr(made, key) for key in given} == given, name


def test_the_page_s_table_adds_up():
    page = Path(__file__).parents[1] / "docs/performance.md"
    section = re.search("<!-- bench: .+?<!-- /bench -->", page.read_text(), re.S)[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")][
        1:
    ]
    rows = {
        line[0].strip(): [float(re.sub("[^0-9.]", "", cell)) for cell in line[1:]] for line in lines
    }
    tokens, base_ms, _, _, base_mib, *_ = rows["unpatched padded"]
    lengths = choose_lengths("instructions", 8).lengths
    assert tokens == 8 * 512 and rows["patched padded"][0] == rows["patched packed"][0] == sum(
        lengths
    )
    for _computed, ms, faster, speed, mib, share, _ in rows.values():
        assert faster == pytest.approx(base_ms / ms, abs=0.01) and share == pytest.approx(
            100 * mib / base_mib, abs=0.6
        )
        assert speed == pytest.approx(sum(lengths) / ms * 1e3, abs=1)


TINY = (
    "bench",
    "qwen3_5",
    "--longest",
    "30",
    "--documents",
    "3",
    "--rounds",
    "1",
    "--threads",
    "1",
)
FAST = ("bench", "small", "--longest", "8", "--documents", "2", "--rounds", "1", "--threads", "1")


@pytest.mark.slow
def test_command(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    picture = tmp_path / "bench.png"
    assert main([*FAST, "--png", str(picture)]) == 0
    out = capsys.readouterr().out
    for name in ("unpatched padded", "unpatched packed", "patched padded", "patched packed"):
        assert out.count(name) >= 1
    ends = r"% of the peak memory(; a packed one \d+\.\d\d times as fast as unpatched packed)?\.$"
    assert re.search(ends, out.strip().splitlines()[-1])
    assert "Patched rows ran conv: " in out and f"torch {version('torch')}" in out
    assert f"Drawn into {picture}." in " ".join(out.split())
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


@pytest.mark.slow
def test_command_as_json(capsys, monkeypatch):
    monkeypatch.setattr("hf_packfree.bench.turns.installed", {"causal-conv1d": "1.7.0"}.get)
    assert main([*FAST, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["real_tokens"] == sum(found["options"]["lengths"]) and len(found["candidates"]) == 4
    )
    assert found["candidates"][0]["times_as_fast"] == 1.0 and found["sentence"].startswith(
        "Qwen3_5ForCausalLM (small)"
    )
    assert found["parameters"] > 7e6 and found["implementations"].keys() >= {
        "conv",
        "delta_rule",
        "attention",
    }
    assert found["versions"]["torch"] == version("torch") and "hf_packfree" in found["versions"]
    assert found["versions"]["causal-conv1d"] == "1.7.0", "what upstream may use"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("bench", "nowhere/nothing"), "found no model"),
        (("bench", "3b"), "or give one of the shapes small, 2b"),
        (("bench", "--documents", "5000", "--longest", "5000"), "wanted at most 16,777,216"),
        (("bench", "--device", "meta"), "found device 'meta', which holds no numbers"),
        (("bench", "--lengths", "nothing.jsonl"), "no file and no distribution"),
        (("bench", "--device", "nonsense"), "found device 'nonsense'"),
    ],
)
def test_wrong_usage_is_a_sentence(capsys, argv, said):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in " ".join(err.split())
