"""Unsloth beside us: steps from one checkpoint, with the same adapters, tokens and labels.

    python -m tests.benchmarks.unsloth --engine prepare --out DIR --work DIR     # saves the checkpoint
    python -m tests.benchmarks.unsloth --engine unsloth --out DIR --work DIR [--minutes M]
    python -m tests.benchmarks.unsloth --engine packfree --out DIR --work DIR [--minutes M]
    ... --trained qlora | full                                  # trainers alone; lora without it
    ... --device cpu --tiny                                     # a trial of the script itself

Each engine is a process of its own with the packages of its own PYTHONPATH: Unsloth 2026.10.9 takes
transformers up to 5.17 and TRL up to 1.15. Where Unsloth is found, its engine is the one that runs,
and nothing of hf_packfree is imported.

r=16, alpha 16 on all twelve kinds of linear layers, a base in bf16, adapters in fp32 under bf16
autocast, layers not recomputed. A step drops gradients, makes the loss, runs backward and fused AdamW;
"loss" is the first step's, the same in both engines but for rounding. Unsloth is loaded as its
documentation does, its own SFTTrainer puts it into packing, and its collator makes the batches.
"unsloth-8k-trainer" is `trainer.train()` of the engine's own SFTTrainer (packing=True), ours with
PackFreeCallback, step to step: the median of the last 20 steps, of 200 or of those that `--minutes`
leave time for; "slow_steps" of them all took 1.5 times as long. "unsloth-8k-qlora-trainer" is that
with bitsandbytes' NF4, as each documents it: ours is prepared by `prepare_model_for_kbit_training`,
and TRL casts its adapters to bf16;
"unsloth-8k-full-trainer" trains all weights, in fp32 under bf16 autocast, Unsloth's with
`full_finetuning=True, float32_mixed_precision=True`, on rows of 16 equal documents: in
each step sizes are the same. "unsloth-leak" times nothing:
"influence" is the largest change of documents' logits when the tokens of the others change, 0 where
documents are kept apart.

Rows are appended to DIR/rows.jsonl, where `tests.benchmarks.run_all --assemble` finds them; those
that it holds are not timed again. Ours have to agree with the rows of `tests.benchmarks.measure`, and
Unsloth's trainer with its loop, else the comparison is not fair.
"""

from __future__ import annotations

import datetime
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

# before torch and transformers: it sets what they read when they are imported
if find_spec("unsloth"):
    import_module("unsloth")

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from tests.benchmarks.shapes import SHAPES, Shape, configuration, log_normal_lengths
from tests.benchmarks.timing import Clock, Results, parser_of
from tests.benchmarks.unsloth_engines import (
    ENGINES,
    TOKENS,
    TRAINED,
    WARMUP,
    adapters_of,
    checked,
    documents,
    reset,
)

PACKAGES = ("unsloth", "unsloth_zoo", "transformers", "torch", "triton", "trl", "peft")
PACKAGES += ("fla-core", "flash-qla")
LEAK = (5, 512, 64, 700, 7, 130, 630)
LAST = 20
"""The steps of a trainer that are its row."""
SHORT = {"torch.float32": "fp32", "torch.bfloat16": "bf16"}
SLOW = 1.5
"""A step that takes so many times as long as the others compiled or tuned something."""


class Begins(TrainerCallback):  # type: ignore[misc]
    """When steps begin, without waiting for the device; ends training when it is `late`."""

    def __init__(self, device: str, late: Callable[[], bool]) -> None:
        self.device, self.late, self.marks = device, late, list[Any]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End training when it is late."""
        control.should_training_stop = control.should_training_stop or self.late()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Mark the stream, or note the time."""
        if self.device != "cuda":
            self.marks.append(time.perf_counter())
            return
        if len(self.marks) == WARMUP:
            torch.cuda.reset_peak_memory_stats()
        self.marks.append(torch.cuda.Event(enable_timing=True))
        self.marks[-1].record()

    def times(self) -> list[float]:
        """Return the ms between those that count."""
        pairs = pairwise(self.marks[WARMUP:])
        if self.device != "cuda":
            return [1e3 * (after - before) for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in pairs]


def loop(engine: Any, clock: Clock, lengths: Sequence[int]) -> dict[str, Any]:
    """Time whole steps of one packed row in a loop of one's own."""
    reset(engine.model)
    trained = adapters_of(engine.model).values()
    batch = engine.batch(documents(lengths, engine.model.config.get_text_config().vocab_size, 1))
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        # new tensors: nothing is remembered from the step before
        inputs = {name: x.clone() for name, x in batch.items()}
        with torch.autocast(engine.device, torch.bfloat16):
            loss: Tensor = engine.model(**inputs, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    loss = step().item()
    settle(clock, step)
    found = clock.measure(step)
    # something compiled late after all
    if found["ms_max"] > SLOW * found["ms"]:
        found = clock.measure(step)
    return {
        **found,
        "loss": loss,
        "whole_step": True,
        "documents": len(lengths),
        "real_tokens": sum(lengths),
        "real_tokens_per_s": 1e3 * sum(lengths) / found["ms"],
        "trained": sum(parameter.numel() for parameter in trained),
    }


def settle(clock: Clock, step: Callable[[], Any], most: int = 15) -> None:
    """Run a step until three in a row take about as long as each other."""
    times = [clock.once(step) for _ in range(3)]
    while max(times[-3:]) > SLOW * min(times[-3:]) and len(times) < most:
        times.append(clock.once(step))


def train(
    engine: Any, clock: Clock, lengths: Sequence[int], late: Callable[[], bool]
) -> dict[str, Any]:
    """Time `trainer.train()` from where a step begins to where the next does."""
    begins = Begins(engine.device, late)
    trainer = engine.trainer(sum(lengths), begins)
    assert trainer.args.gradient_accumulation_steps == 1, "found steps of several rows; wanted one"
    reset(checked(engine.model))
    rows = trainer.train_dataset["seq_lengths"]
    loss, every = trainer.train().training_loss, begins.times()
    times = every[-LAST:]
    ms, real = statistics.median(times), statistics.mean(map(sum, rows))
    return {
        "ms": ms,
        "ms_min": min(times),
        "ms_max": max(times),
        "runs": len(times),
        "steps": len(every),
        "slow_steps": sum(time > SLOW * ms for time in every),
        # what our CUDA graphs keep is allocated by nobody
        "peak_gib": torch.cuda.max_memory_reserved() / 2**30 if clock.device == "cuda" else 0.0,
        "loss": loss,
        "whole_step": True,
        "documents": statistics.mean(map(len, rows)),
        "real_tokens": real,
        "real_tokens_per_s": 1e3 * real / ms,
        "note": "`SFTTrainer`, packing=True, layers not recomputed; means of its rows' tokens and "
        "documents, of its steps' losses; memory reserved",
    }


@torch.no_grad()
def leak(engine: Any, clock: Clock, lengths: Sequence[int]) -> dict[str, Any]:
    """Compare the logits of packed documents with those of a row where every second one has other
    tokens, and with those of each alone; "unmarked": of a row that does not tell where they begin.
    """
    reset(engine.model)
    engine.model.eval()
    vocabulary = engine.model.config.get_text_config().vocab_size
    docs, others = (documents(lengths, vocabulary, seed) for seed in (2, 3))
    mixed = [(one, other)[number % 2] for number, (one, other) in enumerate(zip(docs, others))]

    def logits(batch: dict[str, Any]) -> Tensor:
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        with torch.autocast(engine.device, torch.bfloat16):
            return engine.model(**inputs, use_cache=False).logits[0]  # type: ignore[no-any-return]

    def row(ids: Sequence[Tensor]) -> dict[str, Any]:
        return {"input_ids": torch.cat(list(ids))[None].to(engine.device)}

    alone = torch.cat([logits(row([one])) for one in docs])
    found, changed = logits(engine.batch(docs)), logits(engine.batch(mixed))
    pairs = list(zip(found.split(lengths), changed.split(lengths)))
    influence = max((one - other).abs().max().item() for one, other in pairs[::2])
    unmarked = relative(logits(row(docs)), alone)
    engine.model.train()
    return {
        "influence": influence,
        "logits_against_alone": relative(found, alone),
        "logits_unmarked_against_alone": unmarked,
        "documents": len(lengths),
        "real_tokens": sum(lengths),
    }


def relative(found: Tensor, wanted: Tensor) -> float:
    """The norm of the difference against that of what is wanted."""
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


def versions() -> dict[str, str]:
    """Return what is installed, and the package's own version where it was imported."""
    found = {}
    for name in PACKAGES:
        # the first on the path, as an import finds it
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    package = sys.modules.get("hf_packfree")
    return found | ({"hf_packfree": package.__version__} if package else {})


def prepare(work: Path, shape: Shape, device: str) -> None:
    """Save a model of random weights and a tokenizer of one word a token.

    Every second head of the linear layers remembers for long, as trained ones do.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(configuration(shape), dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data[::2] -= 4
    model.save_pretrained(work / "checkpoint")
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    words = [*special.values(), *(f"w{number}" for number in range(3, 256))]
    plain = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, **special)
    tokenizer.save_pretrained(work / "checkpoint")


def measured(engine: Any, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a row with what it was made on and with."""
    row = measure()
    gpu = engine.device == "cuda"
    adapters = {SHORT[str(x.dtype)] for x in adapters_of(engine.model).values()}
    notes = [engine.note, row.pop("note", "")]
    note = "; ".join(part for part in notes if part)
    return {
        **row,
        **({"lora": adapters.pop()} if adapters else {}),
        "autocast": "bf16",
        "implementations": engine.kernels(),
        "machine": torch.cuda.get_device_name() if gpu else f"CPU {platform.machine()}",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "versions": versions(),
        "script": "tests.benchmarks.unsloth",
        **({"note": note} if note else {}),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Save the checkpoint, or measure an engine's rows."""
    parser = parser_of(__doc__, minutes=1e9)
    parser.add_argument("--engine", required=True, choices=["prepare", *ENGINES])
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--trained", default="lora", choices=TRAINED)
    options = parser.parse_args(arguments)
    if options.engine == "prepare":
        return prepare(options.work, SHAPES["tiny" if options.tiny else "2b"], options.device)
    found = "unsloth" if "unsloth" in sys.modules else "packfree"
    assert options.engine == found, f"found the packages of {found}; wanted {options.engine}"
    part = 32 if options.tiny else 1
    short, long = (
        log_normal_lengths(tokens // part, longest=2048 // part, shortest=32 // part)
        for tokens in TOKENS
    )
    results = Results(options.out / "rows.jsonl", options.minutes, options.only, resume=True)
    rows: dict[str, tuple[Callable[..., dict[str, Any]], Sequence[int]]] = {
        "2b-8k-lora-autocast": (loop, short),
        "2b-32k-lora-autocast": (loop, long),
        "unsloth-leak": (leak, [max(2, length // part) for length in LEAK]),
        "unsloth-8k-trainer": (partial(train, late=results.late), short),
    }
    if options.trained != "lora":
        rows = {f"unsloth-8k-{options.trained}-trainer": rows["unsloth-8k-trainer"]}
    kind = ENGINES[options.engine]
    if not any(results.wanted(workload, kind.variant) for workload in rows):
        return
    engine = kind(options.work, options.device, options.trained)
    clock = Clock(options.device, warmup=0, runs=7, longest=15.0)
    for workload, (measure, lengths) in rows.items():
        step = partial(measure, engine, clock, lengths)
        results.row(workload, kind.variant, partial(measured, engine, step))


if __name__ == "__main__":
    main()
