"""One optimizer step over two rows, on the ranks of a group or alone: what a plain loop puts
beside context parallelism.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_packfree import apply_patches
from hf_packfree.models import context_parallel
from hf_packfree.parallel import ContextParallel
from tests.parallel.ranks import batch_of, widen_islands
from tests.support import tiny

ROWS = ([37, 70, 3, 90, 8], [10, 150, 47])
"""Documents of two rows; data parallelism over two takes one each."""
LORA = [
    "in_proj_qkv",
    "in_proj_z",
    "out_proj",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "up_proj",
    "down_proj",
]


def step(rank: int, way: str, gdn: str, count: str) -> dict[str, object]:
    """Return loss, whole gradients and the number of exchanges: of data parallelism beside context
    parallelism over two ranks.

    Args:
        rank: of a group of 1 (no context parallelism), 2 or 4.
        way: what is around the model, or done to it.
        gdn: see `ContextParallel`.
        count: "all", num_items_in_batch over both rows; "none", the mean of the rows' means; "own",
            a control: each rank's.
    """
    if way != "autocast":
        widen_islands()
    world = dist.get_world_size()
    mesh = init_device_mesh(
        "cpu", (max(world // 2, 1), min(world, 2)), mesh_dim_names=("dp_shard", "cp")
    )
    shared = (
        {"context_parallel": ContextParallel(mesh["cp"], gdn=gdn, attention="heads")}
        if world > 1
        else {"unpacked": "native"}
    )
    model = apply_patches(tiny() if way == "autocast" else tiny().double(), **shared)
    called = wrapped(model, way, mesh)
    rows = [batch_of(lengths, len(lengths)) for lengths in ROWS]
    mine = rows[mesh["dp_shard"].get_local_rank() :: mesh["dp_shard"].size()]
    total = torch.zeros((), dtype=torch.float64)
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchanges:
        for row in mine:
            of_ranks = predicted(row).chunk(mesh["cp"].size(), 1)[mesh["cp"].get_local_rank()]
            counts = {"all": sum(predicted(row).sum() for row in rows), "own": of_ranks.sum()}
            items = {"num_items_in_batch": counts[count]} if count in counts else {}
            with (
                torch.autocast("cpu", torch.bfloat16)
                if way == "autocast"
                else contextlib.nullcontext(),
                # otherwise counts of their own are refused by name
                mock.patch.object(context_parallel, "refuse_other_ranks")
                if count == "own"
                else contextlib.nullcontext(),
            ):
                loss = called(**row, **items).loss
            loss = loss * world if count == "all" else loss / len(mine)
            loss.backward()
            total += loss.detach()
    dist.all_reduce(total)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if way not in ("DDP", "fully_shard"):
        for grad in grads.values():
            dist.all_reduce(grad)
            grad /= world
    whole = {
        name: grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in grads.items()
    }
    return {"loss": total / world, "gradients": whole, "exchanges": exchanges.call_count}


def predicted(row):
    """Which tokens are targets, [1, T]: no document's first."""
    return (row["labels"] != -100) & (row["position_ids"] > 0)


def wrapped(model, way, mesh):
    """Return what the loop calls."""
    if way == "DDP":
        return DistributedDataParallel(model)
    # over what accelerate shards over
    if way == "fully_shard":
        flat = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
        for layer in model.model.layers:
            fully_shard(layer, mesh=flat)
        return fully_shard(model, mesh=flat)
    if "reentrant" in way:
        model.gradient_checkpointing_enable({"use_reentrant": way == "reentrant"})
    if way == "LoRA":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        return get_peft_model(
            model, LoraConfig(r=4, target_modules=LORA, init_lora_weights=False)
        ).train()
    return model
