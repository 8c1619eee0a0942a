"""The head under DDP and FSDP2: two ranks are one."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.mtp.heads import build, labelled, of_head, packed, targets_of, wanted_of, worst_gradient
from tests.ranks import two_ranks
from tests.support import gradients


def gradients_of(rank: int, way: str):
    """What a rank finds; one of the two has documents of one, two and three tokens, and no target at depth 2."""
    model, pairs = build(depth=2), labelled()
    items = targets_of(pairs)
    mine = pairs[1:4] if rank else [pairs[0], *pairs[4:]]
    if way == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for part in (*model.model.layers, *model.mtp.layers, model.mtp, model):
            fully_shard(part, mesh=mesh)
        wrapped = model
    (2 * wrapped(**packed(mine), num_items_in_batch=items).loss).backward()
    whole = {name: getattr(part, "full_tensor", lambda part=part: part)() for name, part in gradients(model).items()}
    return of_head(whole)


@pytest.mark.slow
def test_two_ranks(tmp_path):
    wanted = wanted_of(labelled())
    ways = ["ddp", "fsdp2"]
    for way, ranks in zip(ways, two_ranks(gradients_of, [(way,) for way in ways], tmp_path)):
        for found in ranks:
            assert worst_gradient(found, wanted) <= 1e-4, way
