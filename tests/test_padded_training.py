"""The Trainer with its own padding collator, before and after patching: losses, evaluation,
metrics, label smoothing.
"""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_packfree import PackFreeCallback
from tests.models.padded import IGNORED, Seen
from tests.support import documents, tiny

LENGTHS = (9, 30, 4, 17, 22, 3, 12, 40)


def collate(examples):
    rows = [torch.tensor(example["input_ids"]) for example in examples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def accuracy(prediction):
    logits, labels = prediction
    assert logits.shape == (*labels.shape, 128)
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:])[labels[:, 1:] != IGNORED]
    return {"accuracy": float(right.mean()), "targets": int(right.size)}


def train(folder, patched, **options):
    """Return the losses of three optimizer steps, and what evaluation finds afterwards."""
    data = [{"input_ids": document.tolist()} for document in documents(LENGTHS)]
    seen = Seen(model := tiny())
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=4,
        max_steps=3,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
        dataloader_pin_memory=False,
        **options,
    )
    callbacks = [PackFreeCallback()] if patched else []
    given = {
        "data_collator": collate,
        "train_dataset": data,
        "eval_dataset": data,
        "compute_metrics": accuracy,
    }
    trainer = Trainer(model, arguments, callbacks=callbacks, **given)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert seen.layer[0] == (1 if patched else 2)
    found = trainer.evaluate()
    return (
        [entry["loss"] for entry in logs],
        {name: found[f"eval_{name}"] for name in ("loss", "accuracy", "targets")},
        logs,
    )


@pytest.mark.slow
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_training_and_evaluation_are_the_same(tmp_path, smoothing):
    losses, found, _ = train(tmp_path, False, label_smoothing_factor=smoothing)
    ours, ours_found, logs = train(tmp_path, True, label_smoothing_factor=smoothing)
    assert ours == pytest.approx(losses, rel=1e-5) and losses[0] != pytest.approx(
        losses[2], rel=1e-3
    )
    assert ours_found["loss"] == pytest.approx(found["loss"], rel=1e-5)
    assert ours_found["targets"] == found["targets"] == sum(LENGTHS) - len(LENGTHS)
    assert ours_found["accuracy"] == pytest.approx(found["accuracy"], abs=1.5 / found["targets"])
    assert 0.3 < logs[0]["packfree/real_token_share"] < 1.0, (
        "padding is counted where it came in, not where it was dropped"
    )
