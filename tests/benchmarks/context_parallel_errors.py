"""How far bf16 gradients are from fp32, of a row on one process and shared by two, which may have
one GPU together.

See `context_parallel.py --gradients`; under torchrun every process has a GPU of its own.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from hf_packfree import apply_patches, remove_patches
from hf_packfree.parallel import ContextParallel
from tests.benchmarks.batches import Load
from tests.benchmarks.context_parallel_ranks import group_of
from tests.benchmarks.exchanges import Counted, ThroughHost, exchanging
from tests.benchmarks.models import build, precise_products, what_runs
from tests.benchmarks.shapes import SHAPES, fixed_lengths
from tests.benchmarks.timing import Results
from tests.support import relative_rms

WORLD = 2


def measure_errors(out: Path, device: str, tiny: bool, ways: Sequence[str]) -> None:
    """Write the rows "gradients", of one GPU and of each way to share Gated DeltaNet."""
    if "LOCAL_RANK" in os.environ:
        with group_of(device):
            return _run(Counted(), out, device, tiny, ways)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_share_device, (folder, out, device, tiny, ways), nprocs=WORLD)


def _share_device(
    rank: int, folder: str, out: Path, device: str, tiny: bool, ways: Sequence[str]
) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    _run(ThroughHost(), out, device, tiny, ways)
    dist.destroy_process_group()


def _run(how: Counted, out: Path, device: str, tiny: bool, ways: Sequence[str]) -> None:
    rank = dist.get_rank()
    path = out / "context_parallel.jsonl" if rank == 0 else Path(os.devnull)
    results, tokens = Results(path), 300 if tiny else 8192
    narrow = SHAPES["tiny" if tiny else "2b"]
    shape = replace(narrow, layers=4, sizes={**narrow.sizes, "vocab_size": 256 if tiny else 8192})
    for documents, length in {"documents": 3 * tokens // 8, "one document": tokens}.items():
        load = Load(tuple(fixed_lengths(tokens, length)))
        rounded = build(shape, device)
        for name, parameter in rounded.named_parameters():
            # so slow that documents depend on all of their tokens
            if name.endswith("A_log"):
                parameter.data.fill_(-4.0)
        with precise_products():
            wanted, _ = gradients(copy.deepcopy(rounded).float(), load, device, None, "torch")
        found, runs = gradients(rounded, load, device, None, "auto")
        facts = {
            "tokens": tokens,
            "documents": len(load.lengths),
            "layers": shape.layers,
            "processes": dist.get_world_size(),
        }
        results.add(
            {
                "workload": "gradients",
                "variant": f"{documents}, one GPU",
                **facts,
                **errors(found, wanted),
                **runs,
            }
        )
        for gdn in ways:
            with exchanging(how):
                found, runs = gradients(
                    rounded, load, device, ContextParallel(dist.group.WORLD, gdn=gdn), "auto"
                )
            results.add(
                {
                    "workload": "gradients",
                    "variant": f"{documents}, {gdn}",
                    **facts,
                    **errors(found, wanted),
                    **runs,
                }
            )


def gradients(
    model: Any, load: Load, device: str, settings: ContextParallel | None, backend: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return every parameter's gradient in fp64 on the CPU, summed over the ranks, and what ran."""
    apply_patches(model, backend=backend, context_parallel=settings, unpacked="native")
    inputs = load.inputs(model.config.get_text_config().vocab_size, device)
    model.zero_grad(set_to_none=True)
    targets = load.real_tokens - len(load.lengths)
    model(
        **inputs, labels=inputs["input_ids"], num_items_in_batch=targets, use_cache=False
    ).loss.backward()
    found = {name: parameter.grad.double() for name, parameter in model.named_parameters()}
    if settings is not None:
        for gradient in found.values():
            on_host = gradient.cpu() if dist.get_backend() == "gloo" else gradient
            dist.all_reduce(on_host)
            gradient.copy_(on_host)
    runs = what_runs(model)
    remove_patches(model)
    return {name: gradient.cpu() for name, gradient in found.items()}, runs


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative RMS of all gradients together, and of the worst parameter's."""
    together = (
        torch.cat([gradient.flatten() for gradient in one.values()]) for one in (found, wanted)
    )
    return {
        "all": relative_rms(*together),
        "worst": max(relative_rms(found[name], wanted[name]) for name in wanted),
    }
