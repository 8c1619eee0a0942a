"""Fine-tune with transformers' Trainer, padding-free: python docs/examples/trainer.py"""

from __future__ import annotations

import argparse

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

from hf_packfree import PackFreeCallback


def main() -> None:
    """Train, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Qwen/Qwen3.5-2B-Base", help="a folder or hub id")
    parser.add_argument("--data", help="a JSONL file of texts; default: roneneldan/TinyStories")
    parser.add_argument("--out", default="out")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of a document")
    parser.add_argument("--steps", type=int, default=-1, help="default: one epoch")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    if options.data:
        data = load_dataset("json", data_files=options.data, split="train")
    else:
        data = load_dataset("roneneldan/TinyStories", split="train[:10000]")

    def tokenized(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = tokenizer(rows["text"], truncation=True, max_length=options.max_length - 1)
        return {"input_ids": [[*one, tokenizer.eos_token_id] for one in ids["input_ids"]]}

    gpu = torch.cuda.is_available()
    trainer = Trainer(
        # the text model alone, as docs/quickstart.md explains; without a dtype weights would be in
        # the checkpoint's bfloat16, which small updates do not change
        AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        TrainingArguments(
            options.out,
            per_device_train_batch_size=8,
            max_steps=options.steps,
            num_train_epochs=1,
            learning_rate=1e-5,
            logging_steps=10,
            # autocast, over weights in float32
            bf16=gpu,
            report_to="none",
        ),
        train_dataset=data.map(tokenized, batched=True, remove_columns=data.column_names),
        # the documents of a batch one behind the other, in one row without padding
        data_collator=DataCollatorWithFlattening(),
        processing_class=tokenizer,
        callbacks=[PackFreeCallback(verify_first_batch=True)],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
