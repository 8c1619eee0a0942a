"""Train with rows that the processes of a group share: torchrun --nproc-per-node 2
docs/examples/context_parallel.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import Qwen3_5ForCausalLM

from hf_packfree import apply_patches
from hf_packfree.models.qwen3_5 import tiny_config


def batch(step: int) -> dict[str, torch.Tensor]:
    """Two documents in one row, the same on all ranks: the model takes its part inside forward."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(2, 120, (1, 192), generator=generator)
    positions = torch.cat([torch.arange(150), torch.arange(42)])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids}


def main() -> None:
    """Train a tiny model for some steps."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_rank()) if cuda else torch.device("cpu")
    # the same weights on all ranks
    torch.manual_seed(0)
    model = apply_patches(Qwen3_5ForCausalLM(tiny_config()), context_parallel=dist.group.WORLD).to(
        device
    )
    # which means the gradients: without a count that is right
    trained = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        loss = trained(**{name: tensor.to(device) for name, tensor in batch(step).items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        # a rank's loss is of its own tokens
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
