"""The demo, end to end with few steps: the curves coincide, the numbers agree with each other, the pictures are there."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from hf_packfree.demo import DemoError, DemoOptions, DemoReport, Stage, run_demo
from hf_packfree.demo.report import JUDGED_STEPS, LOSS_LIMIT, Corpus, Training
from hf_packfree.demo.run import TITLES, _train
from hf_packfree.demo.text import LONGEST, SHORTEST, choose_documents, passages, train_tokenizer

STEPS, BATCH = 4, 4


def test_end_to_end(tmp_path):
    """One run, since it takes a while; each part of its report is looked at below."""
    stages: list[Stage] = []
    report = run_demo(DemoOptions(out=tmp_path, steps=STEPS, batch_size=BATCH), stages.append)
    packed_training_equals_padded_training(report)
    all_trainings_saw_the_same_documents_and_targets(report)
    the_stock_model_leaks_and_the_patched_does_not(report)
    cost_is_measured(report)
    files_are_there(report)
    every_stage_was_reported(stages)


def packed_training_equals_padded_training(report):
    assert report.failures() == [] and report.leaks == ()
    assert report.difference <= 1e-6 < LOSS_LIMIT < report.leaking_difference
    assert str(report).startswith("Packed training equals padded training")
    assert report.packed.losses[-1] < report.packed.losses[0]
    for norm, wanted in zip(report.packed.gradient_norms, report.padded.gradient_norms, strict=True):
        assert norm == pytest.approx(wanted, rel=1e-4)


def all_trainings_saw_the_same_documents_and_targets(report):
    for training in report.trainings:
        assert training.documents == (BATCH,) * STEPS
        assert training.tokens == report.padded.tokens and sum(training.tokens) == report.corpus.tokens
        assert training.fingerprints == report.padded.fingerprints
        assert training.targets == tuple(tokens - BATCH for tokens in training.tokens)  # first tokens are no targets
    assert report.padded.real_share < 1 == report.packed.real_share == report.unpatched.real_share


def the_stock_model_leaks_and_the_patched_does_not(report):
    stock, patched = report.verification["stock"], report.verification["patched"]
    assert stock["per_document"][0] < 1e-5 < 1e-2 < min(stock["per_document"][1:])  # nothing lies before the first
    assert max(patched["per_document"]) < 1e-5 and patched["cross_gradient"] == 0.0
    assert len(report.verification["lengths"]) == BATCH


def cost_is_measured(report):
    for training in report.trainings:
        rate = sum(training.tokens[1:]) / sum(training.seconds[1:])
        assert training.tokens_per_second == pytest.approx(rate) and training.peak_memory_mib > 1
    facts = {f"packfree/{name}" for name in ("documents_per_row", "real_token_share", "tokens_per_second")}
    assert facts <= set(report.packed.packing) and report.padded.packing == report.unpatched.packing == {}
    assert report.packed.packing["packfree/documents_per_row"] == BATCH


def files_are_there(report):
    assert report.files == ("loss.png", "leak.png", "cost.png", "report.json")
    for name in report.files[:3]:
        data = (report.options.out / name).read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 20_000
    written = json.loads((report.options.out / "report.json").read_text())
    assert written["packed"]["losses"] == list(report.packed.losses)
    assert written["verdict"]["failures"] == [] and written["verdict"]["sentence"] == str(report)
    assert written["verdict"]["largest_relative_loss_difference"] == report.difference
    assert written["options"]["seed"] == 0 and written["versions"]["torch"] == torch.__version__


def every_stage_was_reported(stages):
    counts: dict[str, list[int]] = {}
    for stage in stages:
        counts.setdefault(stage.name, []).append(stage.done)
    one, many = [0, 1], list(range(STEPS + 1))
    trainings = {title: many for title in TITLES.values()}
    assert counts == {"text, tokenizer, model": one, "leak per document": one, **trainings, "pictures": one}
    assert list(counts)[-1] == "pictures"


def training(name: str = "padded", **change) -> Training:
    """One that went as it should."""
    three = {"documents": (2,) * 3, "tokens": (50,) * 3, "slots": (80,) * 3, "targets": (48,) * 3, "seconds": (1.0,) * 3}
    rest = {"gradient_norms": (1.0,) * 3, "tokens_per_second": 50.0, "peak_memory_mib": 10.0, "device": "cpu"}
    losses = {"losses": (6.0, 5.0, 4.0), "fingerprints": (1, 2, 3)}
    return Training(name=name, title=name, packing={}, **three | rest | losses | change)


def report_of(packed: Training, unpatched: Training | None = None, leaks: tuple[str, ...] = ()) -> DemoReport:
    leaking = unpatched or training("unpatched", losses=(6.0, 5.1, 4.1))
    corpus = Corpus("text", 6, 150, 1024, 20, 25, 30)
    return DemoReport(DemoOptions(), {}, corpus, 1000, {}, leaks, training(), packed, leaking)


def test_a_run_as_promised_has_no_failures():
    report = report_of(training("packed", tokens_per_second=150.0, losses=(6.0, 5.00001, 4.0)))
    assert report.failures() == [] and report.difference == pytest.approx(2e-6) and report.speedup == 3.0
    assert "3.0 times the tokens per second in 1.00 times the memory" in str(report)


@pytest.mark.parametrize(
    "what, change",
    [
        ("loss curves differ", {"losses": (6.0, 5.001, 4.0)}),
        ("loss curves differ", {"losses": (6.0, float("nan"), 4.0)}),
        ("same targets", {"targets": (48, 47, 48)}),
        ("same documents", {"fingerprints": (1, 3, 2)}),
    ],
)
def test_what_is_not_as_promised_is_said(what, change):
    report = report_of(training("packed", **change))
    assert what in report.failures()[0]
    assert str(report).startswith("The demo's check failed: ")


def test_a_control_that_does_not_differ_proves_nothing():
    packed = training("packed", losses=(6.0, 5.00001, 4.0))
    assert "proves nothing" in report_of(packed, unpatched=packed).failures()[0]


def test_a_leak_found_by_verification_is_a_failure():
    assert report_of(training("packed"), leaks=("logits differ",)).failures() == ["logits differ"]


def test_steps_after_the_judged_ones_are_not_judged():
    losses = (5.0,) * JUDGED_STEPS
    padded, packed = training(losses=(*losses, 4.0)), training("packed", losses=(*losses, 4.1))
    assert replace(report_of(packed), padded=padded).difference == 0.0


def test_a_training_that_breaks_off_names_its_log(tmp_path, monkeypatch):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho first >&2\necho 'ImportError: no libfake' >&2\nexit 4\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    wanted = r"'padded, stock' ended with code 4 after 0 of 4 steps \(ImportError: no libfake\).*padded\.log"
    with pytest.raises(DemoError, match=wanted):
        _train("padded", DemoOptions(out=tmp_path, steps=4), lambda stage: None)


def test_documents_are_real_text_of_widely_varying_length():
    texts = passages()
    tokenizer = train_tokenizer(texts)
    documents = choose_documents(tokenizer, texts, 480, seed=0)
    lengths = sorted(map(len, documents))
    assert len(documents) == 480 and lengths[0] >= SHORTEST and lengths[-1] == LONGEST
    assert lengths[48] < 40 and lengths[-48] > 200
    assert documents == choose_documents(tokenizer, texts, 480, seed=0) != choose_documents(tokenizer, texts, 480, seed=1)
    assert all(document[-1] == tokenizer.eos_token_id for document in documents)
    whole = next(document for document in documents if len(document) < LONGEST)
    assert tokenizer.decode(whole[:-1]) in texts


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere only the peak since the start is known")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU's memory is measured instead")
def test_peak_memory_is_what_was_held_at_once_above_the_start():
    code = (
        "import torch; from hf_packfree.demo.memory import PeakMemory; torch.ones(600 * 2**20, dtype=torch.uint8)\n"
        "memory = PeakMemory(); blocks = [torch.ones(400 * 2**20, dtype=torch.uint8) for _ in range(2)]\n"
        "del blocks; print(memory.above())"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert 790 < float(found.stdout) < 830
