"""Layers that FSDP2 shards, each in CUDA graphs of its own: the bits of the same layers without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hf_packfree import patch_report
from hf_packfree.models.state import state_of
from tests.benchmarks.models import put_lora_on
from tests.gpu.checks import DEVICE, TRIAL, gpu
from tests.gpu.small import NARROW, WIDE, small
from tests.gpu.test_graphs import ROWS, step, without
from tests.integrations.marks import needs
from tests.support import (
    checkpoint_layers,
    difference,
    runner_of,
    whole_gradients,
    wrap_layers,
)

pytestmark = [*gpu, pytest.mark.skipif(TRIAL, reason="CUDA graphs need a GPU")]


@pytest.fixture(autouse=True)
def one_rank():
    """NCCL, of this process alone: its collectives run on streams of their own, as on several."""
    dist = torch.distributed
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(shape: Any = NARROW, lora: str = "", kept: bool = False) -> Any:
    model = small(shape, cuda_graphs="auto", unpacked="native")
    if lora:
        put_lora_on(model, lora, False)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(DEVICE, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for layer in model.base_model.layers:
        fully_shard(layer, reshard_after_forward=not kept, **options)
    return model


def both(model: Any, lengths: Any, seed: int) -> tuple[float, float]:
    """The largest differences of values and gradients between graphs and the layers without."""
    model.zero_grad(set_to_none=True)
    found = step(model, lengths, seed)
    grads = whole_gradients(model)
    model.zero_grad(set_to_none=True)
    wanted = without(model, lengths, seed)
    others = whole_gradients(model)
    assert grads.keys() == others.keys()
    worst = max(difference(grads[name], grad) for name, grad in others.items())
    return difference(found, wanted), worst


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("lora", ["", pytest.param("bf16", marks=needs("peft"))])
def test_packings_in_turns(record, lora, kept):
    model = sharded(lora=lora, kept=kept)
    for lengths in ROWS * 2:
        step(model, lengths)
    before = runner_of(model).replayed
    for turn in range(2):
        for number, lengths in enumerate(ROWS):
            values, grads = both(model, lengths, number)
            record(f"{lengths[:3]}, turn {turn}, values", values, 0.0)
            record(f"{lengths[:3]}, turn {turn}, gradients", grads, 0.0)
    replayed = runner_of(model).replayed - before
    assert replayed >= 2 * len(ROWS) - 2, patch_report(model).cuda_graphs


# by transformers, and by torch's wrapper as accelerate puts it around them
@pytest.mark.parametrize("recompute", [checkpoint_layers, wrap_layers])
def test_layers_that_are_recomputed(record, recompute):
    model = sharded()
    recompute(model)
    for lengths in ROWS * 2:
        step(model, lengths)
    for number, lengths in enumerate(ROWS):
        values, grads = both(model, lengths, number)
        record(f"{lengths[:3]}, values", values, 0.0)
        record(f"{lengths[:3]}, gradients", grads, 0.0)
    assert runner_of(model).replayed >= len(ROWS), patch_report(model).cuda_graphs


def test_losses_fall_as_without(record):
    """Weights that an optimizer changes are read, in layers of the 2B model's widths."""
    losses = []
    for graphs in ("auto", "never"):
        torch.manual_seed(0)
        model = sharded(WIDE)
        state_of(model.base_model).__dict__["cuda_graphs"] = graphs
        # of sharded weights and of others
        optimizer = torch.optim.SGD(model.parameters(), 1e-4, foreach=False)
        found = []
        for number in range(12):
            out = step(model, ROWS[number % 2], 1)
            found.append(out.float().pow(2).mean().item())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(found)
        if graphs == "auto":
            assert runner_of(model).replayed >= 8, patch_report(model).cuda_graphs
    steps = [abs(one - other) / other for one, other in zip(losses[0], losses[0][2:], strict=False)]
    assert min(steps) > 1e-3, "the control: weights change"
    # rows without graphs are not padded to their bucket, and round differently
    for number, (one, other) in enumerate(zip(*losses, strict=True)):
        record(f"step {number}", abs(one - other) / other, 1e-4)
