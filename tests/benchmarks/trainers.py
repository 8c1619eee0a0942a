"""`trainer.train()` step to step: TRL's SFTTrainer and the Trainer with their defaults, patched by
the callback, beside transformers' own and the composed model; and beside a loop of one's own.

    python -m tests.benchmarks.trainers --out DIR [--only REGEX]
    python -m tests.benchmarks.trainers --out DIR --device cpu --tiny      # a trial of the script itself

Weights are fp32, and steps run under bf16 autocast (`bf16=True`), which is what both do by default;
in "trl-8k-qlora" they are bitsandbytes' NF4, computing in bf16, and what
`prepare_model_for_kbit_training` makes of the rest: norms, embeddings and head in fp32. A row of
8,192 tokens holds 16 documents of 512, longer ones more of them, one of 2,048 tokens 16 of 128; in
"trl-ragged-lora" a padded batch, which is what TRL makes by default, has 8 documents of 32 to 1,024
tokens. "trl-8k-lora-dropout" has `lora_dropout=0.05`. "ms" is a step's share of the time of the last
20, of 100 there, data loading, clipping and AdamW included; nothing waits for the device between them
but what the trainer does by itself, which logs every 10 steps. TRL recomputes layers by default, the
Trainer does not. "the Trainer waits" is without `hf_packfree.trainer.waits`. "logged" is what the last
log said.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

from hf_packfree import PackFreeCallback, apply_patches, patch_report
from hf_packfree.graphs import copies
from hf_packfree.trainer import callback
from tests.benchmarks.machine import machine
from tests.benchmarks.models import Variant, put_lora_on, quantise, variant_of
from tests.benchmarks.shapes import SHAPES, Shape, log_normal_lengths
from tests.benchmarks.timing import Results, free, parser_of
from tests.benchmarks.workloads import COMPOSED, UNPATCHED_CONV

WARMUP = 10
# the callback patches
PATCHED = Variant(packfree=False)
# the next batch is collated in a process of its own
A_WORKER = {"dataloader_num_workers": 1}


class WalksThrough(PackFreeCallback):
    """Lets the Trainer walk through all modules, as without `hf_packfree.trainer.remembered`."""

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Begin a step."""
        super().on_step_begin(*args, **kwargs)
        assert self._run is not None
        self._run.remembered.take_off()


WITH_DROPOUT, DROPOUT = "lora with dropout", 0.05
ROUNDED = "packfree, weights rounded in each product"
WAITS = "packfree, the Trainer waits"
# {its name: (the model, its callback, the Trainer's arguments)}
VARIANTS: dict[str, tuple[Variant, Callable[[], PackFreeCallback] | None, dict[str, Any]]] = {
    "packfree": (PATCHED, PackFreeCallback, {}),
    WAITS: (PATCHED, PackFreeCallback, {}),
    "packfree, a worker": (PATCHED, PackFreeCallback, A_WORKER),
    "packfree, modules not remembered": (PATCHED, WalksThrough, {}),
    ROUNDED: (PATCHED, PackFreeCallback, {}),
    "packfree, no graphs": (PATCHED, partial(PackFreeCallback, cuda_graphs="never"), {}),
    "composed without packfree": (COMPOSED, None, {}),
    "unpatched packed": (UNPATCHED_CONV, None, {}),
}
LOOPS = {
    "packfree, a loop of one's own": "never",
    "packfree, a loop of one's own, with graphs": "auto",
}


class StepTimes(TrainerCallback):
    """When steps end, in seconds, once the device is done: each, or those of some numbers."""

    def __init__(self, device: str, numbers: Container[int] | None = None) -> None:
        self.ends: list[float] = []
        self.numbers, self.seen = numbers, 0
        self.wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Note the time."""
        self.seen += 1
        if self.numbers is None or self.seen in self.numbers:
            if not self.ends:
                # what loading and capturing left; a long training hardly ever collects it
                gc.collect()
            self.wait()
            self.ends.append(time.perf_counter())


@dataclass(frozen=True)
class Data:
    """Documents of random tokens, enough for all steps.

    Attributes:
        length: that of each; None: log-normal, of up to 1,024 tokens.
        number: how many of them are a step's.
        steps: how many steps, with those before the time is taken.
        rows: what TRL makes of them: "packing", "padding_free", or "padded" batches.
        ranks: how many take rows of their own.
    """

    length: int | None
    number: int = 16
    steps: int = 30
    rows: str = "packing"
    ranks: int = 1

    @property
    def lengths(self) -> list[int]:
        """The documents' lengths."""
        number = self.number * self.steps * self.ranks
        if self.length is not None:
            return [self.length] * number
        # more than enough
        return log_normal_lengths(1024 * number, longest=1024)[:number]

    @property
    def tokens(self) -> float:
        """Tokens of a rank's step, on average."""
        return sum(self.lengths) / self.steps / self.ranks

    def ids(self, vocabulary: int) -> list[list[int]]:
        """Return the documents."""
        generator, lengths = torch.Generator().manual_seed(0), self.lengths
        ids = torch.randint(2, vocabulary - 2, (sum(lengths),), generator=generator)
        return [one.tolist() for one in ids.split(lengths)]


def prepared(model: nn.Module, adapters: str) -> nn.Module:
    """Return a model as it is given to a trainer: for QLoRA in 4 bits, as PEFT's documentation and
    TRL's prepare it.
    """
    if adapters != "qlora":
        return model
    from peft import prepare_model_for_kbit_training

    quantise(model.to(torch.bfloat16))
    options = {"use_reentrant": False}
    return prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=options)  # type: ignore[no-any-return]


def lora_of(adapters: str) -> Any:
    """Return PEFT's configuration of what is trained."""
    from peft import LoraConfig

    dropout = DROPOUT if adapters == WITH_DROPOUT else 0.0
    return LoraConfig(r=16, target_modules="all-linear", lora_dropout=dropout)


def sft(model: nn.Module, data: Data, adapters: str, **common: Any) -> Trainer:
    """Return TRL's trainer as its documentation builds it."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from tests.integrations.test_trl import tokenizer

    callbacks = common.pop("callbacks")
    rows: dict[str, Any] = {"per_device_train_batch_size": data.number}
    if data.rows == "padding_free":
        # TRL cuts rows that are packed alone, and wants to hear that it need not
        rows |= {"padding_free": True, "max_length": None}
    elif data.rows == "packing":
        rows = {"packing": True, "max_length": int(data.tokens), "per_device_train_batch_size": 1}
    ids = data.ids(model.config.get_text_config().vocab_size)
    return SFTTrainer(
        model,
        SFTConfig(**common, **rows),
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        processing_class=tokenizer(),
        peft_config=lora_of(adapters) if adapters else None,
        callbacks=callbacks,
    )


def plain(model: nn.Module, data: Data, adapters: str, **common: Any) -> Trainer:
    """Return transformers' Trainer, with its own collator for packed rows."""
    assert not adapters
    callbacks = common.pop("callbacks")
    ids = data.ids(model.config.get_text_config().vocab_size)
    return Trainer(
        model,
        TrainingArguments(per_device_train_batch_size=data.number, **common),
        train_dataset=[{"input_ids": one} for one in ids],
        data_collator=DataCollatorWithFlattening(
            return_flash_attn_kwargs=True, return_seq_idx=True
        ),
        callbacks=callbacks,
    )


def train(
    make: Callable[..., Trainer],
    shape: Shape,
    variant: Variant,
    patches: Callable[[], PackFreeCallback] | None,
    arguments: dict[str, Any],
    adapters: str,
    data: Data,
    device: str,
) -> dict[str, Any]:
    """Train for some steps and return the row; `patches` makes the callback, `arguments` are the
    Trainer's.
    """
    times = StepTimes(device, (WARMUP, data.steps))
    with (
        tempfile.TemporaryDirectory() as folder,
        variant_of(shape, variant, device, torch.float32) as model,
    ):
        callbacks = [times] if patches is None else [patches(), times]
        common = {
            "output_dir": folder,
            "max_steps": data.steps,
            "bf16": True,
            "use_cpu": device == "cpu",
            "logging_steps": 10,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            **arguments,
        }
        trainer = make(prepared(model, adapters), data, adapters, callbacks=callbacks, **common)
        start_of_peak(device)
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        said = "" if patches is None else patch_report(trainer.model).cuda_graphs
        del trainer
    return of_graphs(timed(times.ends, data, device), said) | {"logged": logs[-1]}


@contextmanager
def without(variant: str) -> Iterator[None]:
    """Within the block, what the variant's name says is left out."""
    with ExitStack() as stack:
        if variant == ROUNDED:
            # without copies of fp32 weights (`hf_packfree.ops.rounded_weights`)
            stack.enter_context(mock.patch.object(copies, "SPARE", 1.0))
        if variant == WAITS:
            stack.enter_context(mock.patch.object(callback, "filter_losses"))
            stack.enter_context(mock.patch.object(callback, "copy_without_waiting"))
        yield


def loop(
    shape: Shape, adapters: str, data: Data, device: str, recomputed: bool, cuda_graphs: str
) -> dict[str, Any]:
    """The same steps in a loop of one's own: patched, autocast, clipping, AdamW."""
    times = StepTimes(device, (WARMUP, data.steps))
    with variant_of(
        shape, replace(PATCHED, checkpointing=recomputed), device, torch.float32
    ) as model:
        apply_patches(prepared(model, adapters), unpacked="native", cuda_graphs=cuda_graphs)
        if adapters:
            put_lora_on(model, "bf16" if adapters == "qlora" else "fp32", dora=False)
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device == "cuda")
        ids = data.ids(model.config.get_text_config().vocab_size)
        collate = DataCollatorWithFlattening()
        start_of_peak(device)
        for first in range(0, len(ids), data.number):
            rows = [{"input_ids": one} for one in ids[first : first + data.number]]
            batch = {
                name: x.to(device) if isinstance(x, Tensor) else x
                for name, x in collate(rows).items()
            }
            with torch.autocast(device, torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            times.on_step_end()
        said = patch_report(model).cuda_graphs
    return of_graphs(timed(times.ends, data, device), said) | {"logged": {"loss": loss.item()}}


def of_graphs(row: dict[str, Any], said: str) -> dict[str, Any]:
    """Return a row with the memory that the process reserves, where graphs ran: what they keep is
    allocated by nobody. `said` is what the report says of them.
    """
    return (
        row | {"note": f"{said}; memory reserved", "peak_gib": row["reserved_gib"]} if said else row
    )


def start_of_peak(device: str) -> None:
    """Forget the most memory that was held until now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def timed(ends: list[float], data: Data, device: str) -> dict[str, Any]:
    """Return time, tokens and memory of a row."""
    (start, end), steps = ends, data.steps - WARMUP
    ms = 1e3 * (end - start) / steps
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    reserved = torch.cuda.max_memory_reserved() / 2**30 if device == "cuda" else 0.0
    return {
        "ms": ms,
        "real_tokens_per_s": 1e3 * data.tokens / ms,
        "peak_gib": peak,
        "reserved_gib": reserved,
        "steps": steps,
        "tokens": data.tokens,
    }


def main() -> None:
    """Measure the chosen rows."""
    options = parser_of(__doc__, minutes=1e9).parse_args()
    shape = SHAPES["tiny" if options.tiny else "2b"]
    results = Results(options.out / "trainers.jsonl", options.minutes, options.only)
    results.add({"workload": "machine", "variant": "", **machine(options.device)})
    ragged = Data(None, number=8, steps=110, rows="padded")
    for workload, make, adapters, data in (
        ("trl-8k-lora", sft, "lora", Data(512)),
        ("trl-8k-qlora", sft, "qlora", Data(512)),
        ("trainer-8k-full", plain, "", Data(512)),
        ("trl-8k-full", sft, "", Data(512)),
        ("trl-8k-lora-padding-free", sft, "lora", Data(512, rows="padding_free")),
        ("trl-2k-lora", sft, "lora", Data(128)),
        ("trl-16k-lora", sft, "lora", Data(512, number=32)),
        ("trl-12k-lora", sft, "lora", Data(512, number=24)),
        ("trl-8k-lora-dropout", sft, WITH_DROPOUT, Data(512)),
        ("trl-ragged-lora", sft, "lora", ragged),
    ):
        if options.tiny:
            data = replace(data, length=8 if data.length else None, steps=30)
        for name, described in VARIANTS.items():
            run = without(name)(train)
            measure = partial(run, make, shape, *described, adapters, data, options.device)
            if data.rows == "padded":
                # the composed model is called with boundaries
                if described[0] is COMPOSED:
                    continue
                name = name.replace("packed", "padded")
            results.row(workload, name, measure)
            free()
        # a loop of one's own has adapters without dropout
        if data.rows == "padded" or adapters == WITH_DROPOUT:
            continue
        recomputed = make is not plain
        for name, graphs in LOOPS.items():
            own = partial(loop, shape, adapters, data, options.device, recomputed, graphs)
            results.row(workload, name, own)
            free()


if __name__ == "__main__":
    main()
