"""Fine-tune with TRL on packed rows: python docs/examples/sft_trl.py"""

from __future__ import annotations

import argparse

import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

from hf_packfree import PackFreeCallback


def main() -> None:
    """Train, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Qwen/Qwen3.5-2B-Base", help="a folder or hub id")
    parser.add_argument("--data", help="a JSONL file of messages; default: trl-lib/Capybara")
    parser.add_argument("--out", default="out")
    parser.add_argument("--max-length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=-1, help="default: one epoch")
    options = parser.parse_args()

    if options.data:
        data = load_dataset("json", data_files=options.data, split="train")
    else:
        data = load_dataset("trl-lib/Capybara", split="train")
    gpu = torch.cuda.is_available()
    trainer = SFTTrainer(
        options.model,
        SFTConfig(
            options.out,
            packing=True,
            max_length=options.max_length,
            # TRL puts the rows of a batch behind each other: 8,192 tokens a step
            per_device_train_batch_size=2,
            max_steps=options.steps,
            num_train_epochs=1,
            learning_rate=1e-5,
            # TRL's default recomputes layers, a third of a step; True where memory is short
            gradient_checkpointing=False,
            logging_steps=10,
            # TRL's default on a GPU: weights in float32, under autocast to bfloat16
            bf16=gpu,
            use_cpu=not gpu,
            report_to="none",
        ),
        train_dataset=data,
        # patches the model; the first packed batch is checked for leaks
        callbacks=[PackFreeCallback(verify_first_batch=True)],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
