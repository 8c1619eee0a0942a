"""Whole training steps under FSDP2 (fp32 shards, bf16 compute) and DDP (fp32 weights, or fp32
adapters on a bf16 base, under autocast): packed rows, every rank with a row of its own.

    torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.fsdp2 --out DIR [--only REGEX] [--resume]
    ... --device cpu --tiny                                   # a trial of the script itself

A step is forward with head and loss, backward and fused AdamW, as accelerate sets FSDP2 up: each
layer and the model sharded, parameters gathered in bf16, gradients reduced in fp32
(`MixedPrecisionPolicy`). "tokens" are a rank's, "real_tokens_per_s" all ranks' together, "ms" and
"peak_gib" the slowest and the fullest rank's; "reserved_gib", the first rank's, has the memory that
CUDA graphs keep. "packfree, one GPU" has bf16 weights and no shards; beside DDP's rows it has the
weights that they have, under autocast. Rows of other `SHARDINGS` say in their name how they are
wrapped.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_packfree import patch_report
from hf_packfree.graphs import parts
from tests.benchmarks.batches import Load
from tests.benchmarks.context_parallel_ranks import Bench, group_of, results_of_ranks
from tests.benchmarks.machine import machine
from tests.benchmarks.models import Variant, variant_of, what_runs
from tests.benchmarks.shapes import SHAPES, TOKENS, log_normal_lengths
from tests.benchmarks.timing import Clock, end_if_failed, parser_of
from tests.benchmarks.workloads import COMPOSED, PACKFREE, PUT_IN, STANDS_IN, UNPATCHED_CONV


class Sharding(NamedTuple):
    """How a model is wrapped.

    Attributes:
        layers: so many are gathered, and their gradients reduced, at once.
        first: so many are in the first group (0: as many as in each), whose weights are gathered
            while nothing else can run, and whose gradients are reduced behind everything else.
        kept: gathered weights stay until the backward pass.
        whole_base: of adapters: they alone are sharded, all in one group; what they adapt is whole
            on each rank, in bf16.
    """

    layers: int = 1
    first: int = 0
    kept: bool = False
    whole_base: bool = False


SHARDINGS = {
    "weights kept": Sharding(kept=True),
    "groups of 4 layers": Sharding(layers=4),
    "groups of 4 layers, weights kept": Sharding(layers=4, kept=True),
    "groups of 2, 11 and 11 layers, weights kept": Sharding(layers=11, first=2, kept=True),
    "frozen weights whole": Sharding(whole_base=True),
}


class Row(NamedTuple):
    """What is measured: a workload by the name of its results, what runs, of which tokens, and in
    how many CUDA graphs a backward pass may be.
    """

    workload: str
    name: str
    variant: Variant
    tokens: int
    parallel: str = "fsdp2"
    note: str = ""
    sharding: Sharding = Sharding()
    backward_parts: int = parts.PARTS


def rows_of() -> list[Row]:
    """Return the rows: ours first, last stock, which may find no memory."""
    variants = {
        "packfree": (PACKFREE, ""),
        "composed without packfree": (
            replace(COMPOSED, liger="with its loss"),
            f"{PUT_IN}, and Liger's fused loss",
        ),
        "unpatched packed": (UNPATCHED_CONV, STANDS_IN),
    }
    workloads: dict[str, tuple[dict[str, Any], int]] = {
        "2b-32k-fsdp2": ({}, TOKENS),
        "2b-8k-fsdp2": ({}, 8192),
        "2b-32k-lora-fsdp2": ({"lora": "fp32"}, TOKENS),
        "2b-8k-lora-fsdp2": ({"lora": "fp32"}, 8192),
    }
    sharded = [
        Row(workload, name, replace(variant, fp32=True, **options), tokens, note=note)
        for name, (variant, note) in variants.items()
        for workload, (options, tokens) in workloads.items()
    ]
    compiled = [
        row._replace(name="packfree, layers compiled", variant=replace(row.variant, compiled=True))
        for row in sharded
        if row.name == "packfree" and row.tokens < TOKENS
    ]
    alone = [
        Row(work, "packfree, one GPU", replace(PACKFREE, **options), tokens, "")
        for work, (options, tokens) in workloads.items()
    ]
    ours = [row for row in sharded if row.name == "packfree"]
    graphed = [
        row._replace(
            name=f"{row.name}, CUDA graphs", variant=replace(row.variant, cuda_graphs="auto")
        )
        for row in ours
        if row.tokens < TOKENS
    ]
    others = [row for row in sharded if row.name != "packfree"]
    beside = find_spec("fla") and find_spec("liger_kernel")
    # stock finds no memory for the logits of 32k tokens, and a rank that fails ends all
    others = [row for row in others if row.name != "unpatched packed" or row.tokens < TOKENS]
    wrapped = [each for row in (*ours, *graphed) for each in wrapped_otherwise(row)]
    return [
        *ours,
        *graphed,
        *alone,
        *(others if beside else []),
        *data_parallel(),
        *compiled,
        *wrapped,
    ]


def wrapped_otherwise(row: Row) -> list[Row]:
    """Return the rows of the same model in other wrappings."""
    rows = [
        row._replace(name=f"{row.name}, wrapped: {name}", sharding=sharding)
        for name, sharding in SHARDINGS.items()
        if row.variant.lora or not sharding.whole_base
    ]
    return [
        each._replace(variant=replace(each.variant, fp32=False))
        if each.sharding.whole_base
        else each
        for each in rows
    ]


def data_parallel() -> list[Row]:
    """Return the rows of DDP, with and without CUDA graphs, and those of one GPU beside them."""
    replayed = replace(PACKFREE, cuda_graphs="auto")
    kinds: dict[str, tuple[Variant, str]] = {
        "packfree": (replayed, "ddp"),
        "packfree, backward pass in one graph": (replayed, "ddp"),
        "packfree, no graphs": (PACKFREE, "ddp"),
        "packfree, one GPU": (replayed, ""),
    }
    return [
        Row(
            work,
            name,
            replace(variant, **options),
            tokens,
            parallel,
            backward_parts=1 if "one graph" in name else parts.PARTS,
        )
        for work, (options, tokens) in {
            "2b-8k-ddp": ({"fp32": True}, 8192),
            "2b-2k-ddp": ({"fp32": True}, 2048),
            "2b-8k-lora-ddp": ({"lora": "fp32"}, 8192),
        }.items()
        for name, (variant, parallel) in kinds.items()
    ]


def shard(model: Any, device: str, sharding: Sharding = Sharding()) -> None:
    """Shard the layers and the rest over all ranks, in place."""
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    layers, size = [*model.model.layers], sharding.layers
    if sharding.whole_base:
        options["ignored_params"] = {one for one in model.parameters() if not one.requires_grad}
        layers = []
    bounds = [0, *range(sharding.first or size, len(layers), size), len(layers)]
    groups = [layers[start:end] for start, end in pairwise(bounds) if start < end]
    for group in groups:
        fully_shard(group, reshard_after_forward=not sharding.kept, **options)
    fully_shard(model, **options)


def measure(bench: Bench, row: Row, tiny: bool) -> dict[str, Any]:
    """Time one row."""
    device, world = bench.clock.device, bench.ranks if row.parallel else 1
    tokens = row.tokens // 128 if tiny else row.tokens
    replicated = row.workload.endswith("-ddp")
    lengths = tuple(log_normal_lengths(tokens, seed=dist.get_rank()))
    load = Load(lengths, whole=True, autocast=replicated)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with (
        variant_of(SHAPES["tiny" if tiny else "2b"], row.variant, device, dtype) as model,
        mock.patch.object(parts, "PARTS", row.backward_parts),
    ):
        called = model
        if row.parallel == "fsdp2":
            shard(model, device, row.sharding)
        elif row.parallel:
            called = DistributedDataParallel(model)
            called.config = model.config
        step = load.step(called, device)
        found = bench.timed(step, together=bool(row.parallel)) | what_runs(model)
        if device == "cuda":
            found["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        found |= {
            "real_tokens_per_s": 1e3 * tokens * world / found["ms"],
            **load.facts(),
            "layers": SHAPES["tiny" if tiny else "2b"].layers,
            "weights": weights_of(row),
            "world": world,
            "ranks": "measured",
        }
        graphs = patch_report(model).cuda_graphs
        del called
        del model, step
    if row.variant.lora:
        found["lora"] = row.variant.lora
    note = graphs if row.variant.cuda_graphs == "auto" else row.note
    return found | ({"note": note} if note else {})


def weights_of(row: Row) -> str:
    """Say what the weights are kept in."""
    if row.sharding.whole_base:
        return "fp32 shards of adapters, bf16 compute, bf16 base"
    if row.parallel == "fsdp2":
        return "fp32 shards, bf16 compute"
    return "fp32" if row.variant.fp32 else "bf16"


def main() -> None:
    """Measure the chosen rows."""
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--resume", action="store_true", help="leave out rows that the file holds")
    options = parser.parse_args()
    bench = Bench(Clock(options.device, warmup=3, runs=options.runs), "auto")
    with group_of(options.device):
        results = results_of_ranks(options.out, "fsdp2", options.only, resume=options.resume)
        results.add({"workload": "machine", "variant": "", **machine(options.device)})
        for row in rows_of():
            results.row(row.workload, row.name, partial(measure, bench, row, options.tiny))
            end_if_failed(results)


if __name__ == "__main__":
    main()
