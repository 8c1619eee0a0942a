"""Unsloth beside us: what both engines are given, what is refused, and rows that the tables know."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.benchmarks import report, unsloth, unsloth_engines
from tests.benchmarks.timing import Clock, read_lines
from tests.benchmarks.unsloth import SLOW, main, measured, settle
from tests.benchmarks.unsloth_engines import EAGER, Unsloth, adapters_of, documents, packed, reset
from tests.integrations.marks import needs

OURS = "packfree, beside unsloth"


def run(folder, engine, trained="lora"):
    given = f"--engine {engine} --out {folder} --work {folder} --trained {trained}"
    main([*given.split(), "--device", "cpu", "--tiny"])
    return read_lines(folder / "rows.jsonl")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("trained", ["full", pytest.param("qlora", marks=needs("bitsandbytes"))])
def test_rows_of_what_else_is_trained(tmp_path, monkeypatch, trained):
    monkeypatch.setattr(unsloth_engines, "STEPS", 4)
    monkeypatch.setattr(unsloth, "WARMUP", 1)
    run(tmp_path, "prepare")
    (row,) = run(tmp_path, "packfree", trained)
    assert row["workload"] in report.TITLES and row["runs"] == 2
    assert row.get("lora") == {"full": None, "qlora": "bf16"}[trained]
    # three in each MLP, five in each linear mixer, four in attention
    wanted = {"full": 0, "qlora": 3 * (3 + 5) + (3 + 4)}[trained]
    assert row["implementations"]["layers_in_4_bits"] == wanted


@pytest.mark.slow
# those of TRL and of what it is called with
@pytest.mark.filterwarnings("default")
def test_rows_of_our_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(unsloth_engines, "STEPS", 4)
    monkeypatch.setattr(unsloth, "WARMUP", 1)
    monkeypatch.setattr(unsloth, "Clock", lambda device, **_: Clock(device, warmup=0, runs=2))
    run(tmp_path, "prepare")
    rows = {row["workload"]: row for row in run(tmp_path, "packfree")}
    short, long, trained = (
        rows[name] for name in ("2b-8k-lora-autocast", "2b-32k-lora-autocast", "unsloth-8k-trainer")
    )
    leak = rows["unsloth-leak"]
    assert {row["variant"] for row in rows.values()} == {OURS}
    assert leak["influence"] == 0
    assert leak["logits_against_alone"] < 0.02 < leak["logits_unmarked_against_alone"]
    assert long["real_tokens"] == 4 * short["real_tokens"] == 4 * trained["real_tokens"]
    assert short["loss"] == pytest.approx(trained["loss"], rel=0.01)
    assert (
        trained["runs"] == trained["steps"] == 2
        and short["implementations"]["delta_rule"] == "torch"
    )
    assert rows.keys() - {"unsloth-leak"} <= report.TITLES.keys()
    # what is there is not timed again
    assert len(run(tmp_path, "packfree")) == len(rows)
    held = [row | {"peak_gib": 1.0} for row in rows.values()]
    result = {"rows": held, "runs": {"1": SOURCE}, **SOURCE}
    assert OURS in report.steps(result)


SOURCE = {"machine": "CPU", "date": "2026-11-25", "versions": {}}


def test_training_ends_when_it_is_late():
    control = SimpleNamespace(should_training_stop=False)
    begins = unsloth.Begins("cpu", iter([False, True]).__next__)
    for late in (False, True, True):
        begins.on_step_end(None, None, control)
        assert control.should_training_stop is late


@pytest.mark.slow
def test_their_process_imports_nothing_of_the_package():
    code = (
        "import sys, tests.benchmarks.unsloth\n"
        "found = [name for name in sys.modules if name.split('.')[0] == 'hf_packfree']\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_engine_needs_its_own_packages(tmp_path):
    with pytest.raises(AssertionError, match="found the packages of packfree; wanted unsloth"):
        run(tmp_path, "unsloth")


def test_a_batch_is_what_trl_makes_of_a_packed_row():
    collator = pytest.importorskip("trl.trainer.sft_trainer").DataCollatorForLanguageModeling
    docs = documents([5, 1, 7], 100, seed=0)
    row = {"input_ids": torch.cat(docs).tolist(), "seq_lengths": [5, 1, 7]}
    wanted = collator(pad_token_id=0, padding_free=True)([row])
    found = packed(docs, "cpu")
    assert found.keys() <= wanted.keys()
    assert all(torch.equal(x, wanted[name]) for name, x in found.items())


class Layers(nn.Module):
    def __init__(self, prefix):
        super().__init__()
        self.prefix, self.lora_A = prefix, nn.Parameter(torch.zeros(2, 3))

    def named_parameters(self):
        yield f"{self.prefix}layers.0.mlp.up_proj.lora_A.default.weight", self.lora_A


def test_adapters_are_the_same_in_every_engine():
    one, other = Layers("base_model.model.model."), Layers("base_model.model.model.language_model.")
    reset(one)
    reset(other)
    assert adapters_of(one).keys() == {"layers.0.mlp.up_proj.lora_A.weight"}
    assert torch.equal(one.lora_A, other.lora_A) and one.lora_A.abs().min() > 0


def test_steps_that_compile_are_not_timed():
    times = iter([900.0, 10, 500, 10, 11, 12, 900])
    settle(SimpleNamespace(once=lambda step: next(times)), lambda: None)
    assert next(times) == 900 and SLOW > 12 / 10


def test_rows_that_unsloth_refuses_to_pack_are_no_result(monkeypatch):
    refused = SimpleNamespace(args=SimpleNamespace(packing=False))
    monkeypatch.setattr(unsloth_engines, "sft", lambda *_: refused)
    monkeypatch.setitem(
        sys.modules, "unsloth.utils.packing", SimpleNamespace(_HYBRID_WARNED={"no kernels"})
    )
    engine = object.__new__(Unsloth)
    vars(engine).update(model=None, tokenizer=None, work=None, device="cpu", trained="lora")
    with pytest.raises(RuntimeError, match="found packing refused, .'no kernels'.; wanted packing"):
        engine.trainer(8192)


def test_a_table_shows_unsloth_beside_us():
    engine = SimpleNamespace(device="cpu", note=EAGER, kernels=dict, model=nn.Module())
    row = measured(engine, lambda: {"ms": 708.0, "peak_gib": 70.0, "note": "one row"})
    assert row["note"] == f"{EAGER}; one row" and row["versions"]["torch"]
    row |= {"workload": "2b-32k-lora-autocast", "variant": Unsloth.variant}
    result = {"rows": [row, row | {"variant": "packfree", "ms": 517.0}]}
    ((_, beside),) = report.chosen(result)
    assert {side: found["ms"] for side, found in beside.items()} == {
        "Unsloth": 708,
        "packfree": 517,
    }
