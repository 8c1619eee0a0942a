"""Shard a model over the processes of a host with FSDP2, on packed rows:

torchrun --nproc-per-node 2 docs/examples/fsdp2.py --model Qwen/Qwen3.5-9B
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from datasets import load_dataset
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening

from hf_packfree import apply_patches


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Qwen/Qwen3.5-9B", help="a folder or hub id")
    parser.add_argument("--data", help="a JSONL file of texts; default: roneneldan/TinyStories")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    if gpu:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    device = torch.device("cuda" if gpu else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    # the text model alone, as docs/quickstart.md explains; patched before fully_shard
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    # with one backward pass for each forward pass
    model = apply_patches(model, cuda_graphs="auto").train()
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = {"mp_policy": half} if gpu else {}
    for layer in model.model.layers:
        fully_shard(layer, **policy)
    fully_shard(model, **policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    if options.data:
        texts = load_dataset("json", data_files=options.data, split="train")["text"]
    else:
        texts = load_dataset("roneneldan/TinyStories", split="train[:10000]")["text"]
    documents = [
        {"input_ids": [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]} for text in texts
    ]
    batches = DataLoader(
        documents,
        batch_size=8,
        sampler=DistributedSampler(documents),
        collate_fn=DataCollatorWithFlattening(),
    )
    for step, batch in zip(range(options.steps), batches):
        loss = model(**{key: value.to(device) for key, value in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
