"""What a process of two does for `test_sharding.py`: DeepSpeed's ZeRO-3, or upstream's tensor parallel plan, on the CPU.

    torchrun --standalone --nproc-per-node 2 tests/integrations/two_processes.py zero3 result.json checkpoint-folder
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Qwen3_5ForCausalLM

from hf_packfree import apply_patches, patch_report
from tests.integrations.compare import RATE, descend, in_steps, labelled, per_document, packed, targets, worst
from tests.support import tiny


def zero3(folder: Path, patched: bool) -> list[dict[str, torch.Tensor]]:
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
    assert model.model.layers[0].linear_attn.A_log.numel() == 0, "the weights are sharded while loading"
    if patched:
        apply_patches(model)
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


def tensor_parallel(folder: Path, patched: bool) -> list[dict[str, torch.Tensor]]:
    """Load with upstream's plan, patch, and train: every rank sees the same row."""
    from transformers.distributed import DistributedConfig

    dist.init_process_group("gloo")
    model = Qwen3_5ForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto")).train()
    sharded = [name for name, p in model.named_parameters() if isinstance(p, torch.distributed.tensor.DTensor)]
    assert any("linear_attn" in name for name in sharded) and any("self_attn" in name for name in sharded)
    if patched:
        apply_patches(model)
    kept = []
    for step in in_steps(labelled()):
        model.zero_grad(set_to_none=True)
        model(**packed(step)).loss.backward()
        kept.append({name: _whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None})
        descend(model, RATE)
    assert patch_report(model).patched == patched
    return kept


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


def main() -> None:
    """Train patched and, as the control, unpatched; write both errors."""
    way, out, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    train = {"zero3": zero3, "tensor_parallel": tensor_parallel}[way]
    found = train(folder, patched=sys.argv[4] == "patched")
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"error": worst(found, per_document(tiny(), in_steps(labelled())))}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
