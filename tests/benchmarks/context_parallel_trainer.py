"""The Trainer on two GPUs, over FSDP2: the same documents shared by context parallelism, and by
data parallelism, each rank with half of them.

    torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.context_parallel_trainer --out DIR [--resume]
    ... --device cpu --tiny                                   # a trial of the script itself

A step is the user's: forward, backward, clipping, AdamW, in bf16 with fp32 weights. "ms" is the
median of the last steps, "losses" are what the Trainer logged, which FSDP2 rounds to bf16.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

from hf_packfree import PackFreeCallback, patch_report
from hf_packfree.parallel.accelerate import cut_rows_again
from tests.benchmarks.context_parallel_ranks import group_of, results_of_ranks
from tests.benchmarks.machine import machine
from tests.benchmarks.models import build, put_lora_on
from tests.benchmarks.shapes import SHAPES
from tests.benchmarks.timing import Results, end_if_failed, free, parser_of
from tests.benchmarks.trainers import StepTimes

STEPS, WARMUP, DOCUMENTS = 6, 3, 8
WAYS = {
    "context parallelism": {"cp_size": 2},
    "data parallelism": {"dp_shard_size": 2},
}


def documents(tiny: bool) -> list[dict[str, list[int]]]:
    """Return what a tokenizer gives: documents of 8,192 random tokens."""
    generator = torch.Generator().manual_seed(0)
    length, vocabulary = (64, 250) if tiny else (8192, 248_000)
    tokens = torch.randint(2, vocabulary, (STEPS * DOCUMENTS, length), generator=generator)
    return [{"input_ids": one} for one in tokens.tolist()]


def measure(way: str, kind: str, device: str, tiny: bool) -> dict[str, Any]:
    """Train for some steps and return the row."""
    from accelerate import ParallelismConfig
    from accelerate.state import AcceleratorState

    # the last row's; each Trainer shares rows in another way
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    shape, times = SHAPES["tiny" if tiny else "2b"], StepTimes(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=DOCUMENTS // WAYS[way].get("dp_shard_size", 1),
            bf16=True,
            use_cpu=device == "cpu",
            logging_steps=1,
            learning_rate=1e-5,
            gradient_checkpointing=kind == "recomputed",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            parallelism_config=ParallelismConfig(**WAYS[way]),
            fsdp=True,
            fsdp_config={"transformer_layer_cls_to_wrap": ["Qwen3_5DecoderLayer"]},
        )
        torch.manual_seed(0)
        model = build(shape, device, torch.float32)
        if kind == "lora":
            put_lora_on(model, "fp32", dora=False)
        trainer = Trainer(
            model,
            arguments,
            train_dataset=documents(tiny),
            data_collator=DataCollatorWithFlattening(),
            callbacks=[PackFreeCallback(), times],
        )
        trainer.train()
    steps = [1e3 * (end - start) for start, end in zip(times.ends, times.ends[1:], strict=False)]
    found = torch.tensor(
        [
            statistics.median(steps[WARMUP - 1 :]),
            torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0,
        ],
        device=device,
    )
    dist.all_reduce(found, dist.ReduceOp.MAX)
    ms, peak = found.tolist()
    with torch.autocast(device, torch.bfloat16):
        report = patch_report(model)
    return {
        "ms": ms,
        "peak_gib": peak,
        "steps_ms": steps,
        "tokens": DOCUMENTS * (64 if tiny else 8192),
        "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "implementations": dict(report.implementations),
        "shared": report.context_parallel,
    }


@contextmanager
def on(device: str) -> Iterator[None]:
    """Let accelerate do on a CPU what it does on GPUs."""
    if device == "cuda":
        yield
        return
    from tests.parallel.trainers import as_on_gpus

    os.environ["ACCELERATE_USE_CPU"] = "true"
    with as_on_gpus():
        yield


@contextmanager
def results_on_ranks(name: str, about: str | None) -> Iterator[tuple[argparse.Namespace, Results]]:
    """Yield a script's options, and where this rank writes its rows, in torchrun's group."""
    parser = parser_of(about)
    parser.add_argument("--resume", action="store_true", help="leave out rows that the file holds")
    options = parser.parse_args()
    with group_of(options.device), on(options.device):
        results = results_of_ranks(options.out, name, options.only, resume=options.resume)
        results.add({"workload": "machine", "variant": "", **machine(options.device)})
        yield options, results


def main() -> None:
    """Measure the rows."""
    with results_on_ranks("context_parallel_trainer", __doc__) as (options, results):
        for kind in ("full", "recomputed", "lora"):
            for way in WAYS:
                measured = partial(measure, way, kind, options.device, options.tiny)
                results.row(f"2b-64k-trainer-{kind}", f"{way} over two GPUs, FSDP2", measured)
                end_if_failed(results)
                cut_rows_again()
                free()


if __name__ == "__main__":
    main()
