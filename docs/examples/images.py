"""Fine-tune on conversations with images, packed: python docs/examples/images.py"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForImageTextToText, AutoProcessor, Trainer, TrainingArguments

from hf_packfree import PackFreeCallback
from hf_packfree.data import PackedVisionCollator


def train(model: Any, processor: Any, examples: Sequence[dict[str, Any]], options: Any) -> Trainer:
    """Train on examples {"messages": [...]}, whose contents hold text and images."""
    trainer = Trainer(
        model,
        TrainingArguments(
            options.out,
            per_device_train_batch_size=8,
            max_steps=options.steps,
            num_train_epochs=1,
            learning_rate=1e-5,
            logging_steps=10,
            # autocast, over weights in float32
            bf16=torch.cuda.is_available(),
            # the collator wants the messages
            remove_unused_columns=False,
            report_to="none",
        ),
        train_dataset=examples,
        # tokens, pixels and their positions of a batch in one row
        data_collator=PackedVisionCollator(processor),
        callbacks=[PackFreeCallback(verify_first_batch=True)],
    )
    trainer.train()
    return trainer


def main() -> None:
    """Load, train, and save model and processor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Qwen/Qwen3.5-2B", help="a folder or hub id")
    parser.add_argument("--data", help="a JSONL file of messages")
    parser.add_argument("--out", default="out")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    # AutoModelForCausalLM would leave the vision tower out
    model = AutoModelForImageTextToText.from_pretrained(options.model, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(options.model)

    def conversation(row: dict[str, Any]) -> dict[str, Any]:
        """Put the row's image before the words of the first message."""
        first, *rest = [
            {"role": turn["role"], "content": [{"type": "text", "text": turn["content"]}]}
            for turn in [*row["prompt"], *row["completion"]]
        ]
        first["content"].insert(0, {"type": "image", "image": row["images"][0]})
        return {"messages": [first, *rest]}

    if options.data:
        lines = Path(options.data).read_text(encoding="utf-8").split("\n")
        examples = [json.loads(line) for line in lines if line.strip()]
    else:
        rows = load_dataset("trl-lib/llava-instruct-mix", split="train[:1000]")
        examples = [conversation(row) for row in rows]
    trainer = train(model, processor, examples, options)
    trainer.save_model()
    processor.save_pretrained(options.out)


if __name__ == "__main__":
    main()
