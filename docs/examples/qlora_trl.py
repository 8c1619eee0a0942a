"""QLoRA with TRL on packed rows: 4-bit weights, adapters in bfloat16, on one GPU.

python docs/examples/qlora_trl.py --model Qwen/Qwen3.5-9B
"""

from __future__ import annotations

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

from hf_packfree import PackFreeCallback, patch_report


def main() -> None:
    """Train, say what ran, and save the adapters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Qwen/Qwen3.5-9B", help="a folder or hub id")
    parser.add_argument("--data", help="a JSONL file of messages; default: trl-lib/Capybara")
    parser.add_argument("--out", default="out")
    parser.add_argument("--max-length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=-1, help="default: one epoch")
    options = parser.parse_args()

    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        # the dtype of activations, or the fused projections are left out: docs/fast.md
        bnb_4bit_compute_dtype=dtype,
    )
    # the text model alone, as docs/quickstart.md explains
    model = AutoModelForCausalLM.from_pretrained(
        options.model, quantization_config=quantised, dtype=dtype
    )
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    # without prepare_model_for_kbit_training, which makes norms and activations float32
    model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    model.enable_input_require_grads()
    if options.data:
        data = load_dataset("json", data_files=options.data, split="train")
    else:
        data = load_dataset("trl-lib/Capybara", split="train")
    trainer = SFTTrainer(
        model,
        SFTConfig(
            options.out,
            packing=True,
            max_length=options.max_length,
            # TRL puts the rows of a batch behind each other: 8,192 tokens a step
            per_device_train_batch_size=2,
            max_steps=options.steps,
            num_train_epochs=1,
            learning_rate=2e-4,
            logging_steps=10,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
        ),
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(options.model),
        callbacks=[PackFreeCallback()],
    )
    print(patch_report(model))
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
