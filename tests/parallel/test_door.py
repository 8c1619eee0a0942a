"""Families made from upstream's under `fully_shard`: what the ranks compute is what one process does."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_packfree import apply_patches
from tests.input_formats import row_batch
from tests.support import ROW, by_family, gradients, relative_rms, tiny

FAMILIES = [
    "llama",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v3",
    "lfm2",
    "olmo_hybrid",
    "granitemoehybrid",
    "nemotron_h",
    "kimi_linear",
]
"""Of every kind of mixer, and of every way to hold them."""


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in by_family])
def test_patched_before_it_is_sharded(group, family):
    batch = row_batch("positions", ROW)
    given, mesh = (
        {**batch.inputs, "labels": batch.inputs["input_ids"]},
        init_device_mesh("cpu", (1,)),
    )
    one, sharded = apply_patches(tiny(family)), apply_patches(tiny(family))
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    losses = [model(**given).loss for model in (one, sharded)]
    for loss in losses:
        loss.backward()
    wanted = gradients(one)
    found = {name: grad.full_tensor() for name, grad in gradients(sharded).items()}
    assert relative_rms(losses[1], losses[0]) <= 1e-6 and found.keys() == wanted.keys()
    assert max(relative_rms(found[name], wanted[name], 1e-6) for name in wanted) <= 1e-5
