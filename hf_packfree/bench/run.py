"""Candidates of one benchmark, in turns in one process, so that whatever else the machine does hits all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hf_packfree.bench import batches
from hf_packfree.bench.floor import Floor
from hf_packfree.bench.memory import HOW, peak_mib, ran_out
from hf_packfree.bench.presets import model_of
from hf_packfree.bench.report import BASE, BenchOptions, BenchReport, Candidate, Progress
from hf_packfree.errors import UnsupportedInput, in_short
from hf_packfree.ops.backend import installed
from hf_packfree.patching.apply import apply_patches, patches_lifted
from hf_packfree.patching.report import patch_report

STOCKS = ("causal-conv1d", "fla-core", "flash-linear-attention", "kernels")
"""Distributions whose kernels transformers' own layers take where they are installed."""
REFUSALS = (ValueError, TypeError, RuntimeError, IndexError, NotImplementedError, ImportError, MemoryError)
"""What transformers and its kernels raise at a batch they do not take, and what any step raises that does not fit."""
LESS = "fewer documents (--documents) or shorter ones (--longest) need less"
"""What to do where memory ran out."""


@dataclass
class _Runner:
    """A candidate being measured."""

    name: str
    model: nn.Module
    batch: dict[str, Any]
    stock: bool
    note: str = ""
    seconds: list[float] = field(default_factory=list)
    peak: float | None = None
    refused: str | None = None
    full: bool = False

    def step(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.model(**self.batch, use_cache=False).loss.backward()

    def attempt(self, measure: Callable[[], None]) -> None:
        """Run, and remember instead of raising it that memory ran out or, of stock, a refusal; ours would be a defect."""
        if self.refused is not None:
            return
        scope: AbstractContextManager[None] = patches_lifted(self.model) if self.stock else nullcontext()
        try:
            with scope:
                measure()
        except REFUSALS as error:
            self.full = ran_out(error)
            if not (self.stock or self.full):
                raise
            text = " ".join(str(error).split())[:300] or type(error).__name__
            self.refused = f"out of memory: {text}; {LESS}" if self.full else text
        self.model.zero_grad(set_to_none=True)

    def done(self) -> Candidate:
        mask = self.batch.get("attention_mask")
        slots = self.batch["input_ids"].numel() if self.stock or mask is None else int(mask.sum())
        return Candidate(self.name, slots, tuple(self.seconds), self.peak, self.refused, self.note)


def run_bench(options: BenchOptions, progress: Progress = lambda what, done, total: None) -> BenchReport:
    """Measure stock padded, stock packed where it runs, and both patched, on the same weights and documents.

    Args:
        options: see `BenchOptions`.
        progress: called before and after every step.

    Raises:
        UnsupportedInput: memory ran out before the first step, or beside the steps.
        UnsupportedModel, PatchConflict, ContractError, BackendUnavailable: as `apply_patches`.
        Exception: whatever a patched step raises, unless memory ran out, which the report says.
    """
    threads = torch.get_num_threads()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        return _measure(options, progress)
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        raise UnsupportedInput(
            f"found no memory for {options.model} and {sum(options.lengths):,} tokens ({in_short(error)}); wanted room for the "
            "weights, the batch and each matrix product; give fewer documents (--documents), shorter ones (--longest) or a "
            "smaller model"
        ) from error
    finally:
        torch.set_num_threads(threads)


def _measure(options: BenchOptions, progress: Progress) -> BenchReport:
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    torch.manual_seed(options.seed)
    model: Any = apply_patches(model_of(options.model, device, dtype, options.trust_remote_code))
    runners = _runners(model, options, device)
    choices = getattr(model.config.get_text_config(), "num_experts_per_tok", 1)
    floor, floors = Floor(model, sum(options.lengths), choices), []
    rounds, total = options.rounds + 2, (options.rounds + 2) * len(runners)
    for number in range(rounds):
        floors.append(floor.seconds())
        for place, runner in enumerate(runners):
            progress(runner.name, number * len(runners) + place, total)
            _one_round(runner, number, rounds, device)
    progress("done", total, total)
    patches = patch_report(model)
    return BenchReport(
        options=options,
        model=f"{type(model).__name__} ({options.model})",
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        device=_name_of(device),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        versions=patches.versions | {name: found for name in STOCKS if (found := installed(name)) is not None},
        candidates=tuple(runner.done() for runner in runners),
        floor=statistics.median(floors[1:]),
        memory=HOW["cuda" if device.type == "cuda" else "cpu"],
        implementations=patches.implementations,
    )


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)" if device.type == "cpu" else device.type


def _runners(model: Any, options: BenchOptions, device: torch.device) -> list[_Runner]:
    documents = batches.documents_of(options.lengths, model.config.get_text_config().vocab_size, options.seed)
    padded, packed = batches.padded(documents, device), batches.packed(documents, device)
    stock_packed = _Runner("stock packed", model, packed, stock=True, note="exact only where transformers' kernels are")
    stock_packed.attempt(stock_packed.step)
    if stock_packed.refused is not None and not stock_packed.full:
        positions = batches.packed(documents, device, every_form=False)
        note = f"leaks: positions alone, because the collator's keywords are refused ({stock_packed.refused})"
        stock_packed = replace(stock_packed, batch=positions, refused=None, note=note)
    return [
        _Runner(BASE, model, padded, stock=True),
        stock_packed,
        _Runner("patched padded", model, padded, stock=False),
        _Runner("patched packed", model, packed, stock=False),
    ]


def _one_round(runner: _Runner, number: int, rounds: int, device: torch.device) -> None:
    """Warm up first, measure memory last, and time in between."""

    def timed() -> None:
        began = _now(device)
        runner.step()
        runner.seconds.append(_now(device) - began)

    def memory() -> None:
        runner.model.zero_grad(set_to_none=True)
        runner.peak = peak_mib(runner.step, device)

    runner.attempt(runner.step if number == 0 else memory if number == rounds - 1 else timed)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
