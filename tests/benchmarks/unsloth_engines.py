"""The two engines of tests.benchmarks.unsloth, which imports Unsloth before this: a model, what it is
called with, its trainer.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from tests.benchmarks.shapes import log_normal_lengths
from tests.benchmarks.timing import free

EAGER = (
    "on torch 2.10 and 2.11 Unsloth keeps packed mixers out of its compiled blocks, which its own "
    "comment puts at 6 to 20% of a step"
)
TARGETS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down", "out")]
TARGETS += [f"in_proj_{name}" for name in ("qkv", "z", "b", "a")]
ADAPTERS: dict[str, Any] = {"r": 16, "lora_alpha": 16, "bias": "none", "target_modules": TARGETS}
TOKENS = (8192, 32768)
STEPS, WARMUP = 200, 10
TRAINED = "lora", "qlora", "full"


def documents(lengths: Iterable[int], vocabulary: int, seed: int) -> list[Tensor]:
    """Random tokens, int64 [T] each, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (length,), generator=generator) for length in lengths]


def packed(docs: Sequence[Tensor], device: str) -> dict[str, Tensor]:
    """One row, [1, T]: restarting positions, and no label where a document begins."""
    ids = torch.cat(list(docs))[None]
    positions = torch.cat([torch.arange(len(one)) for one in docs])[None]
    labels = ids.masked_fill(positions == 0, -100)
    found = {"input_ids": ids, "position_ids": positions, "labels": labels}
    return {name: x.to(device) for name, x in found.items()}


def adapters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters, by names that both engines give them."""
    return {
        name[name.index("layers.") :].replace(".default", ""): parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }


def reset(model: nn.Module) -> None:
    """Give the adapters the same values in every engine, by their names; B is not zero."""
    for name, parameter in adapters_of(model).items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        size = 1 / math.sqrt(parameter.shape[1]) if "lora_A" in name else 0.02
        parameter.data.copy_(size * torch.randn(parameter.shape, generator=generator))


def in_4_bits(model: nn.Module) -> int:
    """Return how many layers hold weights in 4 bits."""
    kinds = Counter(f"{type(one).__module__}.{type(one).__name__}" for one in model.modules())
    # PEFT's layer around it has the same name
    return kinds["bitsandbytes.nn.modules.Linear4bit"]


def checked(model: nn.Module) -> nn.Module:
    """Return a model that trains what its row says."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    # TRL's trainer casts adapters of weights in 4 bits to bf16
    cast = dtypes == {torch.bfloat16} and in_4_bits(model) > 0
    assert dtypes == {torch.float32} or cast, f"found what is trained in {dtypes}; wanted fp32"
    recomputed = {getattr(one, "gradient_checkpointing", False) for one in model.modules()}
    assert not any(recomputed), "found layers that are recomputed; wanted none"
    return model


def row_of(tokens: int, seed: int, even: bool) -> Sequence[int]:
    """The lengths of a row's documents: sixteen `even` ones, or log-normal."""
    if even:
        return [tokens // 16] * 16
    return log_normal_lengths(tokens, longest=tokens // 4, seed=seed)


def sft(
    model: nn.Module,
    tokenizer: Any,
    folder: Path,
    tokens: int,
    device: str,
    trained: str,
    *callbacks: Any,
) -> Any:
    """Return the SFTTrainer that TRL has, or Unsloth in its place, for rows of so many tokens."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    vocabulary = model.config.get_text_config().vocab_size
    rows = [
        one.tolist()
        for seed in range(STEPS + 2)
        for one in documents(row_of(tokens, seed, trained == "full"), vocabulary, seed)
    ]
    arguments = SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        # Unsloth's default is 2
        gradient_accumulation_steps=1,
        packing=True,
        max_length=tokens,
        max_steps=STEPS,
        learning_rate=1e-5,
        gradient_checkpointing=False,
        bf16=True,
        use_cpu=device == "cpu",
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataset_num_proc=1,
    )
    return SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )


class PackFree:
    """A patched model, with PEFT's adapters unless it is trained as a whole."""

    variant, note = "packfree, beside unsloth", ""

    def __init__(self, work: Path, device: str, trained: str) -> None:
        from hf_packfree import apply_patches

        self.work, self.device, self.trained = work, device, trained
        self.tokenizer = AutoTokenizer.from_pretrained(work / "checkpoint")
        # documents alone run in the layers that packed ones run in, as with the callback
        self.model = self._load(partial(apply_patches, unpacked="native"))

    def _load(self, patched: Callable[[Any], Any] = lambda model: model) -> Any:
        place = self.work / "checkpoint"
        if self.trained == "full":
            whole = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
            return checked(patched(whole.to(self.device)).train())
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": {"": self.device}}
        if self.trained == "qlora":
            options["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16,
            )
        base = AutoModelForCausalLM.from_pretrained(place, **options)
        if self.trained == "qlora":
            base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
        config = LoraConfig(task_type="CAUSAL_LM", **ADAPTERS)
        return checked(get_peft_model(patched(base), config).train())

    def batch(self, docs: Sequence[Tensor]) -> dict[str, Any]:
        """Return what the model is called with."""
        return packed(docs, self.device)

    def trainer(self, tokens: int, *callbacks: Any) -> Any:
        """Return the trainer of a model that its callback patches."""
        from hf_packfree import PackFreeCallback

        self.model = None
        free()
        self.model = self._load()
        given = self.model, self.tokenizer, self.work, tokens, self.device, self.trained
        return sft(*given, PackFreeCallback(), *callbacks)

    def kernels(self) -> dict[str, Any]:
        """Return what runs."""
        from hf_packfree import patch_report

        with torch.autocast(self.device, torch.bfloat16):
            found: dict[str, Any] = dict(patch_report(self.model).implementations)
        return found | {"layers_in_4_bits": in_4_bits(self.model)}


class Unsloth:
    """As its documentation loads it; its SFTTrainer decides whether rows can be packed."""

    variant = "unsloth"
    note = EAGER if torch.__version__.startswith(("2.10", "2.11")) else ""
    counts = {
        "unsloth.utils.hf_packed_attention": "HF_PACKED_ATTENTION_STATS",
        "unsloth.utils.packing": "HYBRID_PACKING_STATS",
        "unsloth_zoo.temporary_patches.gdn_causal_conv1d": "GDN_CAUSAL_CONV1D_STATS",
    }

    def __init__(self, work: Path, device: str, trained: str) -> None:
        self.work, self.device, self.trained = work, device, trained
        fast = import_module("unsloth").FastLanguageModel
        common = {"use_gradient_checkpointing": False}
        options: dict[str, Any] = {
            "lora": {"load_in_16bit": True},
            "qlora": {"load_in_4bit": True},
            # else its weights are in bf16
            "full": {"full_finetuning": True, "float32_mixed_precision": True},
        }[trained]
        self.model, self.tokenizer = fast.from_pretrained(
            str(work / "checkpoint"),
            max_seq_length=TOKENS[1],
            dtype=torch.bfloat16,
            **({"load_in_4bit": False} | options | common),
        )
        if trained != "full":
            self.model = fast.get_peft_model(self.model, lora_dropout=0, **ADAPTERS, **common)
        trainer = self.trainer(TOKENS[0])
        self.collate = trainer.data_collator
        fast.for_training(self.model, use_gradient_checkpointing=False)
        checked(self.model)

    def batch(self, docs: Sequence[Tensor]) -> dict[str, Any]:
        """Return what its collator makes of a packed row."""
        row = {"input_ids": torch.cat(list(docs)).tolist(), "seq_lengths": [len(d) for d in docs]}
        found = {name: x.to(self.device) for name, x in self.collate([row]).items()}
        assert "packed_seq_lengths" in found and "attention_mask" not in found, sorted(found)
        for name, wanted in packed(docs, self.device).items():
            assert torch.equal(found[name], wanted), f"its collator makes other {name}"
        return found

    def trainer(self, tokens: int, *callbacks: Any) -> Any:
        """Return its trainer."""
        given = self.model, self.tokenizer, self.work, tokens, self.device, self.trained
        found = sft(*given, *callbacks)
        if not found.args.packing:
            reasons = getattr(sys.modules.get("unsloth.utils.packing"), "_HYBRID_WARNED", ())
            raise RuntimeError(f"found packing refused, {sorted(reasons)}; wanted packing=True")
        return found

    def kernels(self) -> dict[str, Any]:
        """Return what it counted, and how its layers' blocks were compiled (1: whole)."""
        found = {name: getattr(import_module(place), name) for place, name in self.counts.items()}
        modes = {vars(one).get("_unsloth_block_mode") for one in self.model.modules()}
        return {
            **{name: dict(x) for name, x in found.items()},
            "block_modes": sorted(modes - {None}),
            "layers_in_4_bits": in_4_bits(self.model),
        }


ENGINES: dict[str, Any] = {"packfree": PackFree, "unsloth": Unsloth}
