"""What a process of two does for `test_sharding.py`: DeepSpeed's ZeRO-3 on the CPU.

    torchrun --standalone --nproc-per-node 2 tests/integrations/two_processes.py result.json checkpoint-folder patched

The last word is patched, unpatched, or head: the checkpoint has one for multi-token prediction,
which is trained.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Qwen3_5ForCausalLM

from hf_packfree import MTPOptions, apply_patches
from tests.integrations.compare import (
    RATE,
    in_steps,
    labelled,
    packed,
    per_document,
    targets,
    worst,
)
from tests.mtp.heads import WEIGHT, gradients_in_loop, worst_gradient
from tests.support import tiny


def zero3(folder: Path, kind: str) -> list[dict[str, torch.Tensor]]:
    """Load with the weights sharded from the start, as the Trainer does, then patch, then train."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.utils import safe_get_full_grad
    from transformers.integrations import HfDeepSpeedConfig

    deepspeed.init_distributed("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    kept_alive = HfDeepSpeedConfig(config)
    model = Qwen3_5ForCausalLM.from_pretrained(folder).train()
    assert model.model.layers[0].linear_attn.A_log.numel() == 0, (
        "the weights are sharded while loading"
    )
    if kind != "unpatched":
        apply_patches(model, mtp=MTPOptions(depth=2, weight=WEIGHT) if kind == "head" else None)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=kept_alive.config)
    kept = []
    for step in in_steps(labelled()):
        count = sum(targets(labels) for _, labels in step)
        loss = engine(**packed(step[rank::world]), num_items_in_batch=count).loss * world
        engine.backward(loss)
        kept.append({name: safe_get_full_grad(p).clone() for name, p in model.named_parameters()})
        engine.step()
    return kept


def main() -> None:
    """Train patched or, as the control, unpatched; write the error."""
    out, folder, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    found = zero3(folder, kind)
    if dist.get_rank() == 0:
        if kind == "head":
            error = worst_gradient(found[0], gradients_in_loop(in_steps(labelled())[0]))
        else:
            error = worst(found, per_document(tiny(), in_steps(labelled())))
        out.write_text(json.dumps({"error": error}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
