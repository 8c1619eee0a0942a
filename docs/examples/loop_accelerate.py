"""A training loop of one's own with accelerate, and what comes after: save, reload, generate.

python docs/examples/loop_accelerate.py, or accelerate launch docs/examples/loop_accelerate.py
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening

from hf_packfree import apply_patches, remove_patches


def main() -> None:
    """Train, save, reload, and generate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Qwen/Qwen3.5-2B-Base", help="a folder or hub id")
    parser.add_argument("--data", help="a JSONL file of texts; default: roneneldan/TinyStories")
    parser.add_argument("--out", default="out")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    # autocast to bfloat16 on a GPU, and weights in float32, which small updates change
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    # the text model alone, as docs/quickstart.md explains; patched before accelerate wraps it
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    # graphs want one backward pass for each forward pass; gradients may be accumulated
    model = apply_patches(model, unpacked="native", cuda_graphs="auto").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    if options.data:
        texts = load_dataset("json", data_files=options.data, split="train")["text"]
    else:
        texts = load_dataset("roneneldan/TinyStories", split="train[:10000]")["text"]
    documents = [
        {"input_ids": [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]} for text in texts
    ]
    batches = DataLoader(
        documents, batch_size=8, shuffle=True, collate_fn=DataCollatorWithFlattening()
    )
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    for step, batch in zip(range(options.steps), batches):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            accelerator.print(f"step {step}: loss {loss.item():.3f}")

    # keys and config are transformers' own, patched or not
    trained = remove_patches(accelerator.unwrap_model(model))
    if accelerator.is_main_process:
        trained.save_pretrained(options.out)
        tokenizer.save_pretrained(options.out)
        reloaded = AutoModelForCausalLM.from_pretrained(options.out)
        prompt = tokenizer(texts[0][:40], return_tensors="pt")
        found = reloaded.generate(**prompt, max_new_tokens=16)
        print(tokenizer.decode(found[0]))


if __name__ == "__main__":
    main()
