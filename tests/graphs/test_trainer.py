"""The Trainer with `PackFreeCallback` as it is, which replays graphs: with the stand-in of
`on_cpu`.
"""

from __future__ import annotations

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

from hf_packfree import PackFreeCallback
from hf_packfree.models.state import state_of
from tests.graphs import on_cpu
from tests.support import tiny

STEPS, SUMMED, ROWS = 4, 3, 2


class Noted(TrainerCallback):
    """How many rows were replayed by the end of each step."""

    def __init__(self):
        self.found = []

    def on_step_end(self, args, state, control, model, **kwargs):
        self.found.append(state_of(model.model).graphs.of(model.model).replayed)


def train(folder, **options):
    """Return the losses, how many rows had been replayed after each step, and the text model."""
    torch.manual_seed(0)
    model, noted = tiny().train(), Noted()
    ids = torch.randint(2, 60, (STEPS * SUMMED, ROWS, 20)).flatten(0, 1).tolist()
    trainer = Trainer(
        model,
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
        data_collator=DataCollatorWithFlattening(),
        callbacks=[PackFreeCallback(**options), noted],
    )
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return losses, noted.found, model.model


def test_graphs_are_captured_once_the_optimizer_has_its_states(tmp_path, monkeypatch):
    """A graph's memory is never given back to what is allocated later."""
    on_cpu.let_capture_whole_documents(monkeypatch)
    wanted, none, _ = train(tmp_path, cuda_graphs="never")
    found, replayed, trunk = train(tmp_path)
    assert found == pytest.approx(wanted, abs=2e-4) and none == [0] * STEPS
    # of a bucket, the second row is captured
    assert replayed == [0] + [SUMMED * step - 1 for step in range(1, STEPS)]
    reasons = state_of(trunk).graphs.of(trunk).reasons
    assert reasons["the optimizer has made no step yet"] == SUMMED
    assert not state_of(trunk).graphs.wait
