"""The Trainer with `PackFreeCallback` as it is, which replays graphs: with the stand-in of
`on_cpu`.
"""

from __future__ import annotations

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

from hf_packfree import PackFreeCallback
from hf_packfree.errors import LeakDetected
from hf_packfree.models.state import state_of
from hf_packfree.trainer import training_run
from tests.graphs import on_cpu
from tests.support import runner_of, tiny

STEPS, SUMMED, ROWS = 4, 3, 2


class Noted(TrainerCallback):
    """How many rows were replayed by the end of each step."""

    def __init__(self):
        self.found = []

    def on_step_end(self, args, state, control, model, **kwargs):
        self.found.append(runner_of(model).replayed)


def trainer_of(folder, noted, collator=None, **options):
    torch.manual_seed(0)
    ids = torch.randint(2, 60, (STEPS * SUMMED, ROWS, 20)).flatten(0, 1).tolist()
    return Trainer(
        tiny().train(),
        TrainingArguments(
            str(folder),
            max_steps=STEPS,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=SUMMED,
            logging_steps=1,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": one} for one in ids],
        data_collator=collator or DataCollatorWithFlattening(),
        callbacks=[PackFreeCallback(**options), noted],
    )


def train(folder, **options):
    """Return the losses, how many rows had been replayed after each step, and the model."""
    noted = Noted()
    trainer = trainer_of(folder, noted, **options)
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return losses, noted.found, trainer.model


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    on_cpu.let_capture_whole_documents(monkeypatch)


def test_graphs_are_captured_once_the_optimizer_has_its_states(tmp_path):
    """A graph's memory is never given back to what is allocated later."""
    wanted, none, _ = train(tmp_path, cuda_graphs="never")
    found, replayed, model = train(tmp_path)
    assert found == pytest.approx(wanted, abs=2e-4) and none == [0] * STEPS
    # whose rows of the first step were seen
    assert replayed == [SUMMED * step for step in range(STEPS)]
    assert runner_of(model).reasons["the optimizer has made no step yet"] == SUMMED
    assert not state_of(model.model).graphs.wait


def test_a_second_run_replays_the_graphs_of_the_first_from_its_first_step_on(tmp_path):
    """Beside their memory, a step without them would need as much again."""
    noted = Noted()
    trainer = trainer_of(tmp_path, noted)
    trainer.train()
    trainer.train()
    before, first = noted.found[STEPS - 1 : STEPS + 1]
    assert first == before + SUMMED


def test_a_first_step_that_the_loss_scaler_skips_is_none_of_the_optimizer(tmp_path, monkeypatch):
    steps = []

    def skipped(self):
        return len(steps) < 1

    class Counted(Noted):
        def on_step_end(self, *args, **kwargs):
            super().on_step_end(*args, **kwargs)
            steps.append(None)

    monkeypatch.setattr(AcceleratedOptimizer, "step_was_skipped", property(skipped))
    noted = Counted()
    trainer_of(tmp_path, noted).train()
    assert noted.found == [0] + [SUMMED * step for step in range(STEPS - 1)]


def fails(*_):
    raise LeakDetected("found a leak", None)


@pytest.mark.parametrize("where", ["the first batch", "its verification"])
def test_a_run_that_ends_before_its_first_step_lets_graphs_be_captured(
    tmp_path, monkeypatch, where
):
    collate = fails if where == "the first batch" else None
    monkeypatch.setattr(training_run, "first_batch_influence", fails)
    trainer = trainer_of(tmp_path, Noted(), collate, verify_first_batch=True)
    with pytest.raises(LeakDetected):
        trainer.train()
    batch = DataCollatorWithFlattening()([{"input_ids": [*range(2, 22)]}] * ROWS)
    for _ in range(3):
        trainer.model(**batch).loss.backward()
    assert runner_of(trainer.model).replayed == 2
