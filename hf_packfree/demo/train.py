"""One training of the demo in a process of its own: `python -m hf_packfree.demo.train padded|packed|unpatched FOLDER ...`.

This is what a user would write: a model from a folder, the stock Trainer, a stock collator and, for packing, one callback.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from hf_packfree.demo.recorder import Recorder
from hf_packfree.trainer import PackFreeCallback


def padded(folder: Path, **shared: Any) -> Trainer:
    """Return the baseline: stock model, rows padded to the longest, no loss on padding."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Trainer(data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False), **shared)


def unpatched(folder: Path, **shared: Any) -> Trainer:
    """Return the leak: stock model, packed rows."""
    collator = DataCollatorWithFlattening()  # type: ignore[no-untyped-call]
    return Trainer(data_collator=collator, **shared)


def packed(folder: Path, callbacks: list[Any], **shared: Any) -> Trainer:
    """Return the same with the one line that mends it."""
    collator = DataCollatorWithFlattening()  # type: ignore[no-untyped-call]
    return Trainer(data_collator=collator, callbacks=[PackFreeCallback(), *callbacks], **shared)


TRAINERS: dict[str, Callable[..., Trainer]] = {"padded": padded, "packed": packed, "unpatched": unpatched}


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and write one JSON line per step to stdout."""
    options = _parser().parse_args(argv)
    torch.set_num_threads(options.threads)
    folder = options.folder / "model"
    trainer = TRAINERS[options.training](
        folder,
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=_arguments(options),
        train_dataset=[{"input_ids": ids} for ids in json.loads((options.folder / "documents.json").read_text())],
        callbacks=[Recorder(_send)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def _arguments(options: argparse.Namespace) -> TrainingArguments:
    cuda = torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(options.folder / "trainer"),
        per_device_train_batch_size=options.batch_size,
        max_steps=options.steps,
        learning_rate=2e-3,
        seed=options.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=cuda,
        use_cpu=not cuda,
        tf32=False if cuda else None,  # the Trainer turns it on by itself, and it is coarser than a leak is small
    )


def _send(record: dict[str, Any]) -> None:
    device = f"cuda: {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "cpu"
    sys.stdout.write(json.dumps({**record, "device": device}) + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hf_packfree.demo.train", description=__doc__)
    parser.add_argument("training", choices=sorted(TRAINERS))
    parser.add_argument("folder", type=Path)
    for name in ("steps", "batch-size", "seed", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser


if __name__ == "__main__":
    main()
