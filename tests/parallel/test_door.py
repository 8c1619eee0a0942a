"""Families made from upstream's under `fully_shard` and DDP: what the ranks compute is what one
process does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_packfree import apply_patches
from tests.input_formats import row_batch
from tests.integrations.compare import labelled, packed, per_document, targets, worst
from tests.integrations.marks import integration
from tests.ranks import two_ranks
from tests.support import CONTROL, GRADIENT_TOL, ROW, by_family, gradients, relative_rms, tiny

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
    shard(sharded, mesh=mesh)
    losses = [model(**given).loss for model in (one, sharded)]
    for loss in losses:
        loss.backward()
    wanted = gradients(one)
    found = {name: grad.full_tensor() for name, grad in gradients(sharded).items()}
    assert relative_rms(losses[1], losses[0]) <= 1e-6 and found.keys() == wanted.keys()
    assert max(relative_rms(found[name], wanted[name], 1e-6) for name in wanted) <= 1e-5


def shard(model: Any, **options: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


KINDS = [
    name
    for name in ("llama", "gpt_oss", "granitemoehybrid", "lfm2", "kimi_linear")
    if name in by_family
]
"""One of each kind: attention; with windows, sinks and experts; Mamba-2 and experts; short
convolutions; Kimi Delta Attention and latent attention.
"""
DOCUMENTS = labelled((5, 64, 1, 30, 40, 3, 57))
SHARES = DOCUMENTS[:4], DOCUMENTS[4:]
"""Of each rank, with other numbers of targets."""


def step(rank: int, family: str, patched: bool, way: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of all ranks and the gradients of a wrapped model, of a row beside a mask of ones,
    with which attention leaks too.
    """
    model = apply_patches(tiny(family)) if patched else tiny(family)
    wrapped = DistributedDataParallel(model) if way == "DDP" else shard(model)
    row = packed(SHARES[rank])
    row["attention_mask"] = torch.ones_like(row["input_ids"])
    count = sum(targets(labels) for _, labels in DOCUMENTS)
    loss = wrapped(**row, num_items_in_batch=torch.tensor(count)).loss
    # both ways average gradients over ranks
    (loss * len(SHARES)).backward()
    dist.all_reduce(whole := loss.detach().clone())
    return whole.item(), {
        name: grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in gradients(model).items()
    }


@integration("torch", "DDP and FSDP2: Llama, gpt-oss, Granite 4-H, LFM2, Kimi Linear")
@pytest.mark.slow
def test_two_ranks_train_on_their_documents_as_one_process_on_all(tmp_path, record_property):
    cases = [
        (family, patched, way)
        for family in KINDS
        for patched, way in ((True, "DDP"), (True, "FSDP2"), (False, "DDP"))
    ]
    ran = dict(zip(cases, two_ranks(step, cases, tmp_path), strict=True))
    for family in KINDS:
        alone = per_document(tiny(family), [DOCUMENTS])
        loss = loss_alone(tiny(family))
        for way in ("DDP", "FSDP2"):
            for found, grads in ran[family, True, way]:
                record_property("error", error := worst([grads], alone))
                assert error <= GRADIENT_TOL and abs(found / loss - 1) <= 1e-5, (family, way)
        record_property("control", control := worst([ran[family, False, "DDP"][0][1]], alone))
        assert control >= CONTROL * GRADIENT_TOL, family


@torch.no_grad()
def loss_alone(model: Any) -> float:
    """The mean over the targets of all documents, one by one."""
    count = torch.tensor(sum(targets(labels) for _, labels in DOCUMENTS))
    losses = (
        model(input_ids=ids[None], labels=ids[None], num_items_in_batch=count, use_cache=False).loss
        for ids, _ in DOCUMENTS
    )
    return sum(loss.item() for loss in losses)
