"""`trainer.train()` under FSDP2, as transformers' arguments set it up, step to step: SFTTrainer with
LoRA and the Trainer, every rank with a row of 8,192 tokens of its own.

    torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.fsdp2_trainer --out DIR [--only REGEX]
    ... --device cpu --tiny                                   # a trial of the script itself

Rows are those of `tests.benchmarks.trainers`, with fp32 weights in shards, bf16 autocast and each
layer wrapped; "tokens" and memory are the first rank's, "real_tokens_per_s" all ranks' together.
TRL recomputes layers by default, the Trainer does not; "FSDP recomputes" has
`activation_checkpointing` in its `fsdp_config`, which transformers recommends in its place.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch.distributed as dist

from hf_packfree import PackFreeCallback
from tests.benchmarks.context_parallel_trainer import results_on_ranks
from tests.benchmarks.shapes import SHAPES
from tests.benchmarks.timing import end_if_failed, free
from tests.benchmarks.trainers import PATCHED, Data, plain, sft, train
from tests.benchmarks.workloads import UNPATCHED_CONV

WRAPPED = {"transformer_layer_cls_to_wrap": ["Qwen3_5DecoderLayer"]}
RECOMPUTED = {
    "gradient_checkpointing": False,
    "fsdp_config": WRAPPED | {"activation_checkpointing": True},
}
# {its name: (the model, its callback, the Trainer's arguments)}
VARIANTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "packfree": (PATCHED, PackFreeCallback, {}),
    "packfree, no graphs": (PATCHED, partial(PackFreeCallback, cuda_graphs="never"), {}),
    "packfree, FSDP recomputes": (PATCHED, PackFreeCallback, RECOMPUTED),
    "unpatched packed": (UNPATCHED_CONV, None, {}),
}


def measure(make: Any, described: Any, adapters: str, device: str, tiny: bool) -> dict[str, Any]:
    """Train for some steps and return the row."""
    from accelerate.state import AcceleratorState

    # the last row's
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    variant, patches, arguments = described
    arguments = {"fsdp": True, "fsdp_config": WRAPPED, **arguments}
    data = Data(8 if tiny else 512, ranks=dist.get_world_size())
    shape = SHAPES["tiny" if tiny else "2b"]
    row = train(make, shape, variant, patches, arguments, adapters, data, device)
    return row | {"real_tokens_per_s": row["real_tokens_per_s"] * data.ranks, "world": data.ranks}


def main() -> None:
    """Measure the chosen rows."""
    with results_on_ranks("fsdp2_trainer", __doc__) as (options, results):
        for name, described in VARIANTS.items():
            for workload, make, adapters in (
                ("trl-8k-lora-fsdp2", sft, "lora"),
                ("trainer-8k-full-fsdp2", plain, ""),
            ):
                run = partial(measure, make, described, adapters, options.device, options.tiny)
                results.row(workload, name, run)
                end_if_failed(results)
                free()


if __name__ == "__main__":
    main()
