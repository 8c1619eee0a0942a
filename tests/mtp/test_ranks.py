"""The head under DDP and FSDP2: two ranks are one, wherever the language modelling head's weight
is sharded.
"""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_packfree.mtp.attached import training_facts, training_of
from tests.integrations.marks import integration
from tests.mtp.heads import build, gradients_in_loop, labelled, packed, targets_of, worst_gradient
from tests.ranks import two_ranks
from tests.support import gradients

# how the model is sharded, and whether the head's loss is the head's alone
WAYS = [
    ("ddp", True),
    ("in one unit", True),
    ("its own unit", True),
    *(("a unit with the norm", detach) for detach in (True, False)),
]


def share(model, way: str):
    """Return the model to call, sharded between two ranks, unless each has the whole."""
    if way == "ddp":
        return DistributedDataParallel(model)
    units = {
        "its own unit": [model.lm_head],
        "a unit with the norm": [[model.model.norm, model.lm_head]],
    }.get(way, [])
    mesh = init_device_mesh("cpu", (2,))
    for part in (*model.model.layers, *model.mtp.layers, model.mtp, *units, model):
        fully_shard(part, mesh=mesh)
    return model


def gradients_of(rank: int, way: str, detach: bool):
    """What a rank finds and logs; one of the two has documents of one, two and three tokens, and
    no target at depth 2.
    """
    model, pairs = build(depth=2, detach=detach), labelled()
    items = targets_of(pairs)
    mine = pairs[1:4] if rank else [pairs[0], *pairs[4:]]
    # which has to outlive the backward
    wrapped = share(model, way)
    (2 * wrapped(**packed(mine), num_items_in_batch=items).loss).backward()
    found = {
        name: getattr(part, "full_tensor", lambda part=part: part)()
        for name, part in gradients(model).items()
    }
    return found, training_facts(wrapped)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What two ranks found, {(way, detach): each rank's}."""
    return dict(zip(WAYS, two_ranks(gradients_of, WAYS, tmp_path_factory.mktemp("ranks"))))


@pytest.fixture(scope="module")
def alone():
    """Gradients of a loop over documents, {detach: of every parameter}; and what is logged."""
    wanted = {detach: gradients_in_loop(labelled(), detach=detach) for detach in (True, False)}
    assert worst_gradient(wanted[True], wanted[False]) > 0.01
    whole = build(depth=2)
    whole(**packed(labelled()))
    return wanted, training_of(whole).take()


@integration(
    "torch", "multi-token prediction head with DDP and FSDP2, `lm_head` sharded in any unit"
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "detach"),
    WAYS,
    ids=[f"{way}, {'' if detach else 'not '}detached" for way, detach in WAYS],
)
def test_two_ranks(ran, alone, way, detach, record_property):
    """Every gradient: the language modelling head's has the second loss in it only where it is
    not detached.
    """
    wanted, facts = alone
    for found, logged in ran[way, detach]:
        record_property("error", error := worst_gradient(found, wanted[detach]))
        assert error <= 1e-4
        assert logged == pytest.approx(facts, rel=1e-5)
