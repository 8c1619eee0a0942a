"""One training as a user would write it: Hugging Face's Trainer and collators and, for packing, one callback."""

from __future__ import annotations

import time
from copy import deepcopy
from typing import Any

import torch
import transformers
from torch import nn

from hf_packfree.bench.measure import peak_mib
from hf_packfree.demo.report import PACKED, PADDED, DemoOptions, Progress, Training
from hf_packfree.trainer import PackFreeCallback


def train(
    name: str, model: nn.Module, tokenizer: Any, documents: list[list[int]], options: DemoOptions, progress: Progress
) -> Training:
    """Train a copy of the model on documents of token ids; the name says how."""
    library: Any = transformers
    padded = library.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    recorder = _Recorder(name, progress)
    examples = [{"input_ids": ids} for ids in documents]
    trainer = library.Trainer(
        model=deepcopy(model),
        args=_arguments(options),
        train_dataset=examples,
        data_collator=padded if name == PADDED else library.DataCollatorWithFlattening(),
        callbacks=[PackFreeCallback(), recorder] if name == PACKED else [recorder],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    batch = trainer.data_collator(examples[: options.batch_size])
    peak = peak_mib(lambda: trainer.training_step(trainer.model, batch), trainer.args.device)
    columns = {key: tuple(step[key] for step in recorder.steps) for key in recorder.steps[0]}
    return Training(name, peak_mib=peak, **columns)


def _arguments(options: DemoOptions) -> transformers.TrainingArguments:
    cuda = torch.cuda.is_available()
    return transformers.TrainingArguments(
        output_dir=str(options.out), max_steps=options.steps, per_device_train_batch_size=options.batch_size,
        learning_rate=2e-3, seed=options.seed, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=not cuda, dataloader_pin_memory=cuda,
        tf32=False if cuda else None,  # the Trainer turns TF32 on by itself, and its rounding would hide a small leak
    )


class _Recorder(transformers.TrainerCallback):
    """Records per step the loss that the Trainer logs, the tokens that the model sees, and the time from log to log."""

    def __init__(self, name: str, progress: Progress) -> None:
        self.steps: list[dict[str, Any]] = []
        self._name, self._progress, self._counts, self._since = name, progress, dict[str, int](), 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].register_forward_pre_hook(self._count, with_kwargs=True)
        self._progress(self._name, 0, args.max_steps, "")
        self._since = time.perf_counter()

    def _count(self, model: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        tokens, targets = int(ids.numel() if mask is None else mask.sum()), int(inputs.get("num_items_in_batch", 0))
        self._counts = {"tokens": tokens, "tokens_with_padding": ids.numel(), "targets": targets}

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs, now = kwargs["logs"], time.perf_counter()
        if "loss" in logs:
            self.steps.append({"losses": logs["loss"], "seconds": now - self._since, **self._counts})
            self._progress(self._name, len(self.steps), args.max_steps, f"loss {logs['loss']:.3f}")
            self._since = time.perf_counter()
