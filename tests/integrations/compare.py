"""What the tests of other libraries share: documents to train on, and the same training with
each document run alone.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F
from transformers import DataCollatorWithFlattening, TrainerCallback, TrainingArguments

from tests.support import documents, gradients, relative_rms, worst_gradient

LENGTHS = (5, 64, 1, 129, 3, 63, 2, 65, 33, 7, 90, 12)
"""Of twelve documents: three steps of four, whose micro-batches of two hold 69, 130, 66, 67, 40
and 102 tokens.
"""

STEP, STEPS, RATE = 4, 3, 1e-2
IGNORED = -100


def labelled(lengths=LENGTHS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (ids, labels) per document; every token is a target but the first, which nothing
    predicts.
    """
    return [(ids, ids.clone()) for ids in documents(lengths, vocabulary=128)]


def in_steps(items: list, size: int = STEP) -> list[list]:
    """Cut a list into optimizer steps."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed cross entropy of one document's next tokens: logits [n, V], labels [n]."""
    return F.cross_entropy(logits[:-1].float(), labels[1:], reduction="sum", ignore_index=IGNORED)


def targets(labels: torch.Tensor) -> int:
    """Return how many tokens of one document are predicted."""
    return int((labels[1:] != IGNORED).sum())


def per_document(
    model, steps, rate: float = RATE, loss=token_loss
) -> list[dict[str, torch.Tensor]]:
    """Train with SGD, each document in a forward of its own, and return the gradients of every
    step.

    Args:
        model: unpatched, in the state to start from; it is trained in place.
        steps: per optimizer step, the documents (ids, labels) whose token-weighted mean loss it
            descends.
        loss: of one document, summed over its targets.
    """
    kept = []
    for step in steps:
        model.zero_grad(set_to_none=True)
        count = sum(targets(labels) for _, labels in step)
        for ids, labels in step:
            if targets(labels):
                logits = model(input_ids=ids[None], use_cache=False).logits[0]
                (loss(logits, labels) / count).backward()
        kept.append(gradients(model))
        descend(model, rate)
    return kept


def packed(items) -> dict[str, torch.Tensor]:
    """Return the documents as one row, as transformers' collator makes it."""
    return DataCollatorWithFlattening()(rows(items)) | {"use_cache": False}


def in_rows(model, call=None) -> list[dict[str, torch.Tensor]]:
    """Run the steps of `per_document` on packed rows, through `call` if it is not the model that
    is called.
    """
    kept = []
    for step in in_steps(labelled()):
        model.zero_grad(set_to_none=True)
        (model if call is None else call)(**packed(step)).loss.backward()
        kept.append(gradients(model))
        descend(model, RATE)
    return kept


@torch.no_grad()
def descend(model, rate: float) -> None:
    """Take one step of SGD."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter -= rate * parameter.grad


class KeepGradients(TrainerCallback):
    """Copies the gradients of every optimizer step of a Trainer."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Called when all micro-batches of a step are summed."""
        self.steps.append(gradients(kwargs["model"]))


def arguments(folder, kind=TrainingArguments, **more):
    """Return training arguments for plain SGD over the documents in order, on the CPU, in fp32."""
    settings = {
        "max_steps": STEPS,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "seed": 1,
    }
    settings |= {
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    settings |= {
        "use_cpu": True,
        "per_device_train_batch_size": STEP,
        "dataloader_pin_memory": False,
        "bf16": False,
    }
    return kind(output_dir=str(folder), train_sampling_strategy="sequential", **settings | more)


def rows(items) -> list[dict[str, list[int]]]:
    """Return the documents as a Trainer's dataset."""
    return [{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in items]


def worst(
    found: list[dict[str, torch.Tensor]], wanted: list[dict[str, torch.Tensor]], floor: float = 1e-2
) -> float:
    """Return the largest relative RMS of any parameter's gradient in any step.

    As `tests.support.errors`: a gradient that is zero but for rounding counts against `floor` times
    the median one.
    """
    assert len(found) == len(wanted) > 0
    return max(worst_gradient(*pair, floor) for pair in zip(found, wanted))


def overall(found: list[dict[str, torch.Tensor]], wanted: list[dict[str, torch.Tensor]]) -> float:
    """Return the largest relative RMS of all gradients of a step together."""
    flat = [
        [torch.cat([step[name].flatten() for name in sorted(step)]) for step in steps]
        for steps in (found, wanted)
    ]
    return max(relative_rms(*pair) for pair in zip(*flat))
