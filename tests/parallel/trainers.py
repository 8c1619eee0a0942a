"""What the Trainer makes of a tiny model on ranks, two of which share each row, or alone."""

from __future__ import annotations

import contextlib
import math
import os
import runpy
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from hf_packfree import PackFreeCallback, apply_patches, remove_patches
from hf_packfree.errors import BoundaryConflict
from hf_packfree.packing.lazy import LazyTensor
from hf_packfree.parallel import ContextParallel
from hf_packfree.parallel.accelerate import leave_rows_whole
from tests.parallel.ranks import batch_of, widen_islands
from tests.parallel.training import LORA
from tests.support import documents, tiny

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "context_parallel_trainer.py"
LENGTHS = [37, 70, 3, 90, 8, 20, 100, 60, 40, 12, 33, 39, 5, 1, 76]
RESUMED = {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch", "adam_epsilon": 1e-2}
SETTINGS = {
    "example": {},
    "bf16": {"bf16": True},
    "accumulation": {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1},
    "checkpointing": {"gradient_checkpointing": True, "max_grad_norm": 0.1},
    "LoRA": {},
    "resumed": RESUMED,
    "sp_size": {},
    "own loop": {},
    "offsets": {},
    "fully_shard": {
        "fsdp": True,
        "fsdp_config": {"transformer_layer_cls_to_wrap": ["Qwen3_5DecoderLayer"]},
        **RESUMED,
        "gradient_accumulation_steps": 2,
    },
}
"""By what stands around the model, or is done to it."""
SIZES = {"sp_size": {"sp_size": 2}, "fully_shard": {"dp_shard_size": 2, "cp_size": 2}}
"""Of the ways that are not two ranks of `cp_size`."""
ALONE = {
    "fully_shard": {
        "fsdp": None,
        "fsdp_config": None,
        "per_device_train_batch_size": 6,
        "per_device_eval_batch_size": 6,
    },
}
"""What else a process alone is given: the documents that data parallel ranks take side by side."""
LAUNCHED = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"}
"""What `accelerate launch` says instead of the Trainer's arguments: of the way "checkpointing"."""


def train(rank: int, folder: str, way: str) -> dict[str, object]:
    """Return what two steps of three documents a row log, evaluate and change, in fp64 but for
    bf16.
    """
    world = dist.get_world_size()
    if world not in (1, math.prod(sizes_of(way).values())) or world == 1 and way == "offsets":
        # a rank that leaves a group before all are in it lets the others wait
        dist.barrier()
        return {}
    # which come first: it stays so
    if way not in ("example", "bf16"):
        widen_islands()
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    return {"example": by_example, "own loop": in_own_loop}.get(way, by_trainer)(
        Path(folder, str(world), way), way
    )


def by_example(place, way) -> dict[str, object]:
    """Return what the documentation's program logs."""
    with as_on_gpus():
        return {"losses": runpy.run_path(str(EXAMPLE))["main"](str(place))}


def by_trainer(place, way) -> dict[str, object]:
    """Return what the Trainer logs, evaluates and changes."""
    world, model = dist.get_world_size(), model_for(way)
    before, prepare = (
        {name: p.detach().clone() for name, p in model.named_parameters()},
        Accelerator._prepare_cp,
    )
    shared = (
        {"parallelism_config": ParallelismConfig(**sizes_of(way))}
        if world > 1 and way != "checkpointing"
        else {}
    )
    trainer, unread = trainer_of(model, place, way, **shared), Unread(model)
    if way == "offsets":
        return refused(trainer, model) | {"as it was": Accelerator._prepare_cp is prepare}
    evaluated = []
    # a Trainer that only evaluates never prepares its model
    if way == "LoRA":
        untrained = model_for(way)
        evaluated.append(
            trainer_of(untrained, trainer.args.output_dir, way, **shared).evaluate()["eval_loss"]
        )
        remove_patches(untrained)
    trainer.train()
    if way in ("resumed", "fully_shard"):
        checkpoint = str(Path(trainer.args.output_dir, "checkpoint-1"))
        trainer = trainer_of(model := model_for(way), trainer.args.output_dir, way, **shared)
        unread = Unread(model)
        trainer.train(resume_from_checkpoint=checkpoint)
    # from where it is, with the same Trainer
    if way == "accumulation":
        trainer.train()
    evaluated.append(trainer.evaluate()["eval_loss"])
    meshes = {p.device_mesh.size() for p in model.parameters() if isinstance(p, DTensor)}
    now = (
        trainer.accelerator.get_state_dict(trainer.model_wrapped)
        if meshes
        else dict(model.named_parameters())
    )
    return {
        "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "evaluated": evaluated,
        # gathered on the first rank
        "moved": {name: now[name].detach() - p for name, p in before.items()} if now else {},
        "shards": meshes,
        "without logits": unread.all(),
        "as it was": Accelerator._prepare_cp is prepare,
    }


class Unread:
    """Whether training steps of a model made no logits."""

    def __init__(self, model) -> None:
        self.logits = []
        model.register_forward_hook(self)

    def __call__(self, model, args, output) -> None:
        if torch.is_grad_enabled():
            self.logits.append(output.logits)

    def all(self) -> bool:
        lazy = [isinstance(x, LazyTensor) and x.source.values is None for x in self.logits]
        return len(lazy) > 0 and all(lazy)


def sizes_of(way):
    return SIZES.get(way, {"cp_size": 2})


def in_own_loop(place, way) -> dict[str, object]:
    """Return what a loop changes in two steps of a model that accelerate prepares."""
    model = model_for(way)
    before, prepare = (
        {name: p.detach().clone() for name, p in model.named_parameters()},
        Accelerator._prepare_cp,
    )
    optimizer, losses = torch.optim.SGD(model.parameters(), 1e-2), []
    with as_on_gpus():
        accelerator = Accelerator(
            parallelism_config=ParallelismConfig(cp_size=dist.get_world_size())
        )
    if dist.get_world_size() == 1:
        apply_patches(model)
    else:
        apply_patches(model, context_parallel=accelerator.torch_device_mesh["cp"])
        leave_rows_whole(model)
    called, optimizer = accelerator.prepare(model, optimizer)
    for lengths in (LENGTHS[:5], LENGTHS[5:8]):
        row = batch_of(lengths, 0)
        with accelerator.maybe_context_parallel(
            buffers=[*row.values()], buffer_seq_dims=[1] * len(row)
        ):
            accelerator.backward(loss := called(**row).loss)
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        optimizer.step()
        optimizer.zero_grad()
    remove_patches(model)
    return {
        "losses": losses,
        "evaluated": [],
        "moved": {name: p.detach() - before[name] for name, p in model.named_parameters()},
        "shards": set(),
        "as it was": Accelerator._prepare_cp is prepare,
    }


def refused(trainer, model) -> dict[str, object]:
    """Return the sentence that training ends with, and give the model back."""
    try:
        trainer.train()
    except BoundaryConflict as error:
        remove_patches(model)
        return {"refused": str(error)}
    return {}


def model_for(way):
    model = tiny() if way == "bf16" else tiny().double()
    if way != "LoRA":
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=4, target_modules=LORA, init_lora_weights=False)
    ).train()


def trainer_of(model, place, way, **shared):
    common = {
        "learning_rate": 1e-2,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "max_steps": 2,
    }
    common |= {
        "per_device_train_batch_size": 3,
        "per_device_eval_batch_size": 3,
        "logging_steps": 1,
        "report_to": [],
    }
    common |= {
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "use_cpu": True,
    }
    settings = SETTINGS[way] | (ALONE.get(way, {}) if dist.get_world_size() == 1 else {})
    data = [
        {"input_ids": one.tolist(), "labels": one.tolist()}
        for one in documents(LENGTHS * 2 if way in ALONE else LENGTHS)
    ]
    collator = (
        {"return_flash_attn_kwargs": True, "return_position_ids": False} if way == "offsets" else {}
    )
    by_states = way == "accumulation" and dist.get_world_size() > 1
    ranks = ContextParallel(dist.group.WORLD, gdn="state") if by_states else "auto"
    launched = LAUNCHED if way == "checkpointing" and dist.get_world_size() > 1 else {}
    with as_on_gpus(), mock.patch.dict(os.environ, launched):
        return Trainer(
            model,
            TrainingArguments(str(place), ddp_backend="gloo", **common | settings | shared),
            train_dataset=data,
            eval_dataset=data,
            data_collator=DataCollatorWithFlattening(**collator),
            callbacks=[
                PackFreeCallback(context_parallel=ranks, verify_first_batch=way == "offsets")
            ],
        )


@contextlib.contextmanager
def as_on_gpus():
    """Let accelerate share rows and shard on a CPU."""
    sizes = mock.patch.object(ParallelismConfig, "_validate_accelerator")
    with sizes, mock.patch.object(AcceleratorState, "__init__", sharding):
        yield


_init = AcceleratorState.__init__


def sharding(self, *args, fsdp_plugin=None, **kwargs) -> None:
    """Take FSDP's plugin on a CPU, too."""
    _init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        if self.mixed_precision != "no":
            # as on GPUs
            fsdp_plugin.set_mixed_precision(self.mixed_precision)
