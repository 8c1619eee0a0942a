"""The Trainer with `PackFreeCallback` as it is, which replays CUDA graphs: the losses of training
without graphs, with accumulated gradients, clipping and evaluation in between.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

from hf_packfree import PackFreeCallback
from hf_packfree.trainer import callback
from tests.benchmarks.models import put_lora_on
from tests.gpu.checks import DEVICE, TRIAL, gpu
from tests.gpu.small import NARROW, small
from tests.support import runner_of

pytestmark = gpu
STEPS, SUMMED, EVERY = (4, 2, 2) if TRIAL else (24, 2, 5)
"""Steps, batches whose gradients are summed in each, and steps between two evaluations."""
LENGTHS = (3, 9, 4, 8) if TRIAL else (500, 37, 900, 611)


def documents(number: int) -> list[dict[str, list[int]]]:
    """The documents of so many rows."""
    generator = torch.Generator().manual_seed(0)
    return [
        {"input_ids": torch.randint(2, 60, (length,), generator=generator).tolist()}
        for _ in range(number)
        for length in LENGTHS
    ]


def trainer_of(
    folder: Any, lora: bool, recomputed: bool, *callbacks: TrainerCallback, **more: Any
) -> Trainer:
    """Return what trains on the same few rows again and again."""
    torch.manual_seed(0)
    model = small(NARROW, torch.float32, patched=False).train()
    if lora:
        put_lora_on(model, "fp32", dora=False)
    options: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": len(LENGTHS),
        "per_device_eval_batch_size": len(LENGTHS),
        "gradient_accumulation_steps": SUMMED,
        "gradient_checkpointing": recomputed,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "bf16": True,
        "use_cpu": DEVICE == "cpu",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
    }
    return Trainer(
        model,
        TrainingArguments(str(folder), **options | more),
        train_dataset=documents(2 * SUMMED),
        eval_dataset=documents(1),
        data_collator=DataCollatorWithFlattening(),
        callbacks=[*callbacks],
    )


def losses(folder: Any, lora: bool, recomputed: bool, **options: Any) -> tuple[torch.Tensor, Any]:
    """Return the losses of a training, those of evaluations, too, and the model."""
    often = {"eval_strategy": "steps", "eval_steps": EVERY, "logging_steps": 1}
    trainer = trainer_of(folder, lora, recomputed, PackFreeCallback(**options), **often)
    trainer.train()
    logs = trainer.state.log_history
    found = [log[name] for log in logs for name in ("loss", "eval_loss") if name in log]
    return torch.tensor(found), trainer.model


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_losses_are_those_without_graphs(record, tmp_path, lora, recomputed):
    wanted, _ = losses(tmp_path, lora, recomputed, cuda_graphs="never")
    found, model = losses(tmp_path, lora, recomputed)
    # rows are as long as their bucket
    record("losses", (found - wanted).abs().max().item(), 0.0)
    assert TRIAL or found[0] - found[-1] > 0.5, "stale weights would show"
    if not TRIAL:
        runner = runner_of(model)
        # without: the first step, and the row with which the bucket is seen for the first time
        assert runner.replayed >= SUMMED * (STEPS - 1) - 1, runner.reasons


class Waits(TrainerCallback):
    """Where the host waits for the GPU from the middle of a training on, as torch warns of it."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def on_step_end(self, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
        if state.global_step in (STEPS // 2, STEPS - 1):
            torch.cuda.set_sync_debug_mode("warn" if state.global_step < STEPS - 1 else "default")

    def note(self, message: Any, category: Any, filename: str, line: int, *rest: Any) -> None:
        if "called a synchronizing" in str(message):
            self.found.append(f"{filename}:{line}")


def waits_of(folder: Any, monkeypatch: Any, lora: bool) -> list[str]:
    """Return where the Trainer's steps wait."""
    found = Waits()
    trainer = trainer_of(folder, lora, False, PackFreeCallback(), found, logging_steps=10 * STEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", found.note)
        trainer.train()
    return found.found


@pytest.mark.skipif(TRIAL, reason="a CPU waits for nothing")
@pytest.mark.parametrize("lora", [False, True])
def test_no_step_waits_for_the_gpu(tmp_path, monkeypatch, lora):
    assert not waits_of(tmp_path, monkeypatch, lora)
    # the control: the Trainer copies two batches and asks of two losses in each step
    monkeypatch.setattr(callback, "filter_losses", lambda _: None)
    monkeypatch.setattr(callback, "copy_without_waiting", lambda _: None)
    found = waits_of(tmp_path, monkeypatch, lora)
    assert len(found) >= 4 * (STEPS // 2 - 1), found
