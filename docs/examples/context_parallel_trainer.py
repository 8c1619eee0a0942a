"""The Trainer on rows that two GPUs share, since accelerate shares none on CPUs:

torchrun --nproc-per-node 2 docs/examples/context_parallel_trainer.py
"""

from __future__ import annotations

import os

import torch
from accelerate import ParallelismConfig
from transformers import DataCollatorWithFlattening, Qwen3_5ForCausalLM, Trainer, TrainingArguments

from hf_packfree import PackFreeCallback
from hf_packfree.models.qwen3_5 import tiny_config


def examples(count: int) -> list[dict[str, list[int]]]:
    """Documents of 10 to 100 tokens, as a tokenizer gives them."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 100, (count,), generator=generator).tolist()
    return [
        {"input_ids": torch.randint(2, 120, (length,), generator=generator).tolist()}
        for length in lengths
    ]


def main(folder: str = "trained") -> list[float]:
    """Train a tiny model for three steps of two micro-batches, each a row of four documents;
    return the losses logged.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    layers = {"transformer_layer_cls_to_wrap": ["Qwen3_5DecoderLayer"]}
    shared = (
        {
            "parallelism_config": ParallelismConfig(cp_size=ranks),
            "fsdp": True,
            "fsdp_config": layers,
        }
        if ranks > 1
        else {}
    )
    arguments = TrainingArguments(
        folder,
        max_steps=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        **shared,
    )
    # the same weights on all ranks
    torch.manual_seed(0)
    trainer = Trainer(
        Qwen3_5ForCausalLM(tiny_config()),
        arguments,
        train_dataset=examples(24),
        data_collator=DataCollatorWithFlattening(),
        callbacks=[PackFreeCallback()],
    )
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


if __name__ == "__main__":
    main()
