"""The demo, end to end with few steps: the curves coincide, the numbers agree with each other,
the picture is there.
"""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure

from hf_packfree.cli import show
from hf_packfree.demo import DemoOptions, DemoReport, Training, harm, plot, run_demo, train
from hf_packfree.demo.results import (
    JUDGED_STEPS,
    LEAKING,
    LOSS_LIMIT,
    PACKED,
    PADDED,
    Continuations,
    Influence,
)
from hf_packfree.demo.train import LONGEST, SHORTEST, choose_documents, passages, train_tokenizer
from hf_packfree.verify import LIMITS, Measurement, PackingReport
from tests.graphs import on_cpu

STEPS, BATCH = 4, 4


@pytest.mark.slow
def test_end_to_end(tmp_path):
    """One run, since it takes a while; each part of its report is checked below."""
    threads, stages = torch.get_num_threads(), []
    report = run_demo(
        DemoOptions(out=tmp_path, steps=STEPS, batch_size=BATCH),
        lambda *stage: stages.append(stage),
    )
    assert torch.get_num_threads() == threads
    packed_training_equals_padded_training(report)
    a_neighbour_changes_what_the_unpatched_model_does(report)
    all_trainings_saw_the_same_documents_and_targets(report)
    the_unpatched_model_leaks_and_the_patched_does_not(report)
    cost_is_measured(report)
    files_are_there(report)
    every_stage_was_reported(stages)


@pytest.mark.slow
def test_memory_is_measured_in_a_step_that_captures_nothing(tmp_path, monkeypatch):
    """What a capture allocates is what its graph keeps, and would be counted twice."""
    on_cpu.let_capture_whole_documents(monkeypatch)
    captured, during = [], []
    capture, peak = on_cpu.Again._capture, train.peak_mib

    def counted(*args):
        captured.append(None)
        return capture(*args)

    def measured(step, device, **options):
        before = len(captured)
        found = peak(step, device, **options)
        during.append(len(captured) - before)
        return found

    monkeypatch.setattr(on_cpu.Again, "_capture", counted)
    monkeypatch.setattr(train, "peak_mib", measured)
    tokenizer = train_tokenizer(passages())
    options = DemoOptions(out=tmp_path, steps=2, batch_size=1)
    # the only row, of which the first step waits for the optimizer
    documents = choose_documents(tokenizer, passages(), 1, seed=0) * 2
    model = train.build_model(tokenizer, seed=0)
    train.train(PACKED, model, tokenizer, documents, options, lambda *_: None)
    assert captured and during == [0]


def packed_training_equals_padded_training(report):
    assert report.failures() == []
    packed, leaking = (
        training.difference(report.padded) for training in (report.packed, report.unpatched)
    )
    assert packed <= 1e-6 < LOSS_LIMIT < leaking
    assert str(report).startswith("Packed training equals padded training")
    assert report.packed.losses[-1] < report.packed.losses[0]


def a_neighbour_changes_what_the_unpatched_model_does(report):
    assert report.exact.worst == 0.0 < 1e-3 < report.leaking.worst
    # later documents read earlier ones
    assert all(report.leaking.matrix[reader][0] > 0 for reader in range(BATCH))
    texts = report.continuations
    assert set(texts.patched) == {texts.alone} and set(texts.unpatched) != {texts.alone}
    assert "% off (patched: " in report.harm()


def all_trainings_saw_the_same_documents_and_targets(report):
    for training in report.trainings:
        assert training.tokens == report.padded.tokens and sum(training.tokens) == sum(
            report.lengths
        )
        # first tokens are no targets
        assert training.targets == tuple(tokens - BATCH for tokens in training.tokens)
    assert report.padded.real_share < 1 == report.packed.real_share == report.unpatched.real_share


def the_unpatched_model_leaks_and_the_patched_does_not(report):
    unpatched, patched = report.verification.unpatched, report.verification.patched
    # nothing is before the first
    assert unpatched.per_document[0] < 1e-5 < 1e-2 < min(unpatched.per_document[1:])
    assert max(patched.per_document) < 1e-5 and patched.cross_gradient == 0.0
    assert report.verification.lengths == report.lengths[:BATCH]


def cost_is_measured(report):
    for training in report.trainings:
        assert training.tokens_per_second == sum(training.tokens[1:]) / sum(training.seconds[1:])
    # gradients are held in any case
    assert report.parameters * 4 / 2**20 < report.packed.peak_mib < report.padded.peak_mib


def files_are_there(report):
    assert report.files == ("demo.png", "report.json")
    data = (report.options.out / "demo.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 40_000
    written = json.loads((report.options.out / "report.json").read_text())
    assert written["packed"]["losses"] == list(report.packed.losses)
    assert written["failures"] == [] and written["sentence"] == str(report)
    assert (
        written["options"]["out"] == str(report.options.out)
        and written["versions"]["torch"] == torch.__version__
    )


def every_stage_was_reported(stages):
    counts: dict[str, list[int]] = {}
    for name, done, total, _ in stages:
        counts.setdefault(name, []).append(done)
        assert done <= total
    trainings = {name: list(range(STEPS + 1)) for name in (PADDED, PACKED, LEAKING)}
    assert counts == {
        "text, tokenizer, model": [0, 1],
        "leak per document": [0, 1],
        **trainings,
        "what the leak does": [0, 1],
        "picture": [0, 1],
    }
    assert list(counts)[-1] == "picture"


def training(name: str = PADDED, **change) -> Training:
    """One that went as it should."""
    three = {
        "tokens": (50,) * 3,
        "tokens_with_padding": (80,) * 3,
        "targets": (48,) * 3,
        "seconds": (1.0,) * 3,
    }
    return Training(**{"name": name, "losses": (6.0, 5.0, 4.0), "peak_mib": 10.0, **three} | change)


def report_of(
    packed: Training, unpatched: Training | None = None, logits: float = 1e-7
) -> DemoReport:
    leaking = unpatched or training(LEAKING, losses=(6.0, 5.1, 4.1))
    found, control = (
        Measurement(error, 1e-6, "A_log", 0.0, 0.0, (error,) * 2) for error in (logits, 0.2)
    )
    verification = PackingReport(
        "M", "qwen3_5", "cpu", "float32", (20, 30), found, control, LIMITS[torch.float32]
    )
    return DemoReport(
        DemoOptions(),
        {},
        "cpu",
        (20, 25, 30),
        1000,
        verification,
        training(),
        packed,
        leaking,
        Influence(((1.0, 0.0), (0.25, 1.0))),
        Influence(((1.0, 0.0), (0.0, 1.0))),
        Continuations("once", "upon", ("down", "upon"), ("upon", "upon")),
    )


def test_a_run_as_promised_has_no_failures():
    report = report_of(training(PACKED, seconds=(1.0, 0.25, 0.75), losses=(6.0, 5.00001, 4.0)))
    assert report.failures() == [] and report.packed.difference(report.padded) == pytest.approx(
        2e-6
    )
    assert "2.0 times the tokens per second in 1.00 times the memory" in str(report)


@pytest.mark.parametrize(
    "what, change",
    [
        ("loss curves differ", {"losses": (6.0, 5.001, 4.0)}),
        ("loss curves differ", {"losses": (6.0, float("nan"), 4.0)}),
        ("same targets", {"targets": (48, 47, 48)}),
        ("same documents", {"tokens": (50, 49, 51)}),
    ],
)
def test_what_is_not_as_promised_is_said(what, change):
    report = report_of(training(PACKED, **change))
    assert what in report.failures()[0]
    assert str(report).startswith("The demo's check failed: ")


def test_a_loss_that_is_not_a_number_is_null_in_the_report():
    assert report_of(training(PACKED, losses=(6.0, float("nan"), 4.0))).as_dict()["packed"][
        "losses"
    ] == [6.0, None, 4.0]


def test_a_control_that_does_not_differ_proves_nothing():
    packed = training(PACKED, losses=(6.0, 5.00001, 4.0))
    assert "proves nothing" in report_of(packed, unpatched=packed).failures()[0]


def test_a_leak_found_by_verification_is_a_failure():
    (failure,) = report_of(training(PACKED), logits=1e-3).failures()
    assert failure.startswith("logits differ from a forward per document: 1.0e-03")


def test_the_table_has_the_order_of_every_other_one(capsys):
    """Without patches, then with them."""
    show.demo(report_of(training(PACKED)))
    rows = [
        line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if "│" in line
    ]
    assert rows == [PADDED, LEAKING, PACKED] == ["padded", "packed, unpatched", "packed, patched"]


def test_the_picture_cuts_no_word_off(tmp_path, monkeypatch):
    """Long texts, a machine with a long name and every package of a GPU machine included."""
    drawn = []
    monkeypatch.setattr(
        plot, "Figure", lambda **options: drawn.append(Figure(**options)) or drawn[-1]
    )
    long = " ".join(["quite", "a", "long", "continuation"] * 5)
    names = ("torch", "triton", "transformers", "fla-core", "flash-qla", "hf_packfree")
    report = replace(
        report_of(training(PACKED)),
        continuations=Continuations(long, long, (long, long), (long, long)),
        versions={name: "2.13.0+cu130" for name in names},
        device="NVIDIA H200",
        leaking=Influence(((1.0,) * 8,) * 8),
        exact=Influence(((1.0,) * 8,) * 8),
    )
    plot.draw(report, tmp_path / "demo.png")
    (figure,) = drawn
    # in inches
    drawn_on, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert drawn_on.x0 >= 0 and drawn_on.y0 >= 0
    assert drawn_on.x1 <= width and drawn_on.y1 <= height


def test_the_beginning_that_is_continued_is_one_that_a_neighbour_changes(monkeypatch):
    """However late it comes; and nothing is continued after the end token."""
    documents = [[number] * 30 for number in range(30)]

    class Tokenizer:
        def decode(self, ids):
            return " ".join(map(str, ids))

    def continuation(model, neighbours, prompt):
        leaks = model == "unpatched" and prompt[0] == 20
        return [prompt[0], *(neighbour[0] for neighbour in neighbours if leaks)]

    with monkeypatch.context() as patch:
        patch.setattr(harm, "continuation", continuation)
        found = harm.continuations("unpatched", "patched", Tokenizer(), documents)
    assert found == Continuations("20 20 20 20 20 20", "20", ("20 0", "20 1"), ("20", "20"))

    model = SimpleNamespace(config=SimpleNamespace(eos_token_id=3))
    # each token is followed by the next number
    nexts = torch.eye(19).roll(1, 1)
    monkeypatch.setattr(harm, "logits", lambda model, row: [nexts[ids] for ids in row])
    assert harm.continuation(model, [[7]], [0, 1]) == [2, 3]
    assert len(harm.continuation(model, [[7]], [4])) == harm.NEW


def test_steps_after_the_judged_ones_are_not_judged():
    losses = (5.0,) * JUDGED_STEPS
    padded, packed = training(losses=(*losses, 4.0)), training(PACKED, losses=(*losses, 4.1))
    assert (
        packed.difference(padded)
        == 0.0
        == replace(packed, losses=losses).difference(replace(padded, losses=losses))
    )


def test_documents_are_real_text_of_widely_varying_length():
    texts = passages()
    tokenizer = train_tokenizer(texts)
    documents = choose_documents(tokenizer, texts, 480, seed=0)
    lengths = sorted(map(len, documents))
    assert len(documents) == 480 and lengths[0] >= SHORTEST and lengths[-1] == LONGEST
    assert lengths[48] < 40 and lengths[-48] > 200
    assert (
        documents
        == choose_documents(tokenizer, texts, 480, seed=0)
        != choose_documents(tokenizer, texts, 480, seed=1)
    )
    assert all(document[-1] == tokenizer.eos_token_id for document in documents)
    whole = next(document for document in documents if len(document) < LONGEST)
    assert tokenizer.decode(whole[:-1]) in texts
