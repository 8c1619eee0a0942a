"""Runs the candidates of one benchmark in turns in one process, so that other load on the machine
slows all of them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hf_packfree.bench.candidates import (
    BASE,
    OPTIONAL,
    BenchOptions,
    BenchReport,
    Candidate,
    CommonOptions,
    Progress,
)
from hf_packfree.bench.lengths import (
    documents_of,
    illustrated,
    packed,
    packed_media,
    padded,
    padded_media,
)
from hf_packfree.bench.measure import HOW, Floor, name_of, peak_mib, threads
from hf_packfree.bench.shapes import model_of
from hf_packfree.errors import UnsupportedInput, in_short, ran_out
from hf_packfree.models.run_options import CudaGraphs
from hf_packfree.ops.backend import dtype_name, installed
from hf_packfree.patching.apply import apply_patches, patches_lifted
from hf_packfree.patching.registry import family_of
from hf_packfree.patching.report import patch_report
from hf_packfree.verify.random_documents import media_source

UPSTREAM_KERNELS = ("causal-conv1d", "fla-core", "flash-linear-attention", "kernels")
"""Distributions whose kernels transformers' own layers use if they are installed."""
REFUSALS = (
    ValueError,
    TypeError,
    RuntimeError,
    IndexError,
    NotImplementedError,
    ImportError,
    MemoryError,
)
"""What transformers and its kernels raise for a batch that they do not support, or that does not
fit into memory.
"""
LESS = "fewer documents (--documents) or shorter ones (--longest) need less"
"""The advice when memory runs out."""


@dataclass
class Trial:
    """A candidate that is being measured; `less` is the advice if memory runs out."""

    name: str
    model: nn.Module
    batch: dict[str, Any]
    patched: bool
    note: str = ""
    seconds: list[float] = field(default_factory=list)
    peak: float | None = None
    refused: str | None = None
    full: bool = False
    less: str = LESS

    def step(self) -> None:
        """Run forward and backward."""
        self.model.zero_grad(set_to_none=True)
        self.model(**self.batch, use_cache=False).loss.backward()

    def attempt(self, measure: Callable[[], None]) -> None:
        """Run `measure`. If memory runs out, or the unpatched model raises one of `REFUSALS`, that
        is noted in `refused`; other errors of the patched model are raised, since they are defects.
        """
        if self.refused is not None:
            return
        scope: AbstractContextManager[None] = (
            nullcontext() if self.patched else patches_lifted(self.model)
        )
        try:
            with scope:
                measure()
        except REFUSALS as error:
            self.full = ran_out(error)
            if self.patched and not self.full:
                raise
            text = " ".join(str(error).split())[:300] or type(error).__name__
            self.refused = f"out of memory: {text}; {self.less}" if self.full else text
        self.model.zero_grad(set_to_none=True)

    def done(self) -> Candidate:
        """Return the candidate with its measurements."""
        mask = self.batch.get("attention_mask")
        tokens = (
            int(mask.sum())
            if self.patched and mask is not None
            else self.batch["input_ids"].numel()
        )
        return Candidate(self.name, tokens, tuple(self.seconds), self.peak, self.refused, self.note)


def run_bench(
    options: BenchOptions, progress: Progress = lambda what, done, total: None
) -> BenchReport:
    """Measure padded and packed steps, unpatched and patched, on the same weights and documents;
    unpatched packed only if transformers runs it.

    Args:
        options: see `BenchOptions`.
        progress: called before and after every step.

    Raises:
        UnsupportedInput: memory ran out before the first step, or outside of the steps.
        UnsupportedModel, PatchConflict, ContractError, BackendUnavailable: as `apply_patches`.
        Exception: any error of a patched step, except that memory ran out, which the report says.
    """
    with memory_for(options, "fewer documents (--documents), shorter ones (--longest)"):
        model = patched_model(options, cuda_graphs="auto")
        runners = _runners(model, options, torch.device(options.device))
        choices = getattr(model.config.get_text_config(), "num_experts_per_tok", 1)
        floor, floors = Floor(model, sum(options.lengths), choices), list[float]()
        in_turns(runners, options, progress, lambda: floors.append(floor.seconds()))
        if torch.device(options.device).type == "cuda":
            runners[-1].note = f"with patched padded, {patch_report(model).cuda_graphs}"
        images = runners[0].batch.get("image_grid_thw")
        return BenchReport(
            options=options,
            **what_ran(model, options, runners, UPSTREAM_KERNELS),
            floor=statistics.median(floors[1:]),
            images=0 if images is None else len(images),
            patches=0 if images is None else int(images.prod(-1).sum()),
        )


@contextmanager
def memory_for(options: CommonOptions, less: str) -> Iterator[None]:
    """Run the block with the options' threads; if memory runs out, raise with the advice `less`.

    Raises:
        UnsupportedInput: memory ran out.
    """
    try:
        with threads(options.threads):
            yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        raise UnsupportedInput(
            f"found no memory for {options.model} and {sum(options.lengths):,} tokens "
            f"({in_short(error)}); wanted room for the weights, the batch and each matrix product; "
            f"give {less} or a smaller model"
        ) from error


def patched_model(options: CommonOptions, cuda_graphs: CudaGraphs = "never") -> Any:
    """Return the model of a benchmark, patched."""
    dtype = getattr(torch, options.dtype) if options.dtype else None
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    model = model_of(options.model, device, dtype, options.trust_remote_code)
    return apply_patches(model, cuda_graphs=cuda_graphs)


def in_turns(
    runners: Sequence[Trial],
    options: CommonOptions,
    progress: Progress,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Run all candidates once a round: one warm-up round, the timed rounds, and one in which memory
    is measured.

    Args:
        between: runs before every round.
    """
    rounds, device = options.rounds + 2, torch.device(options.device)
    total = rounds * len(runners)
    for number in range(rounds):
        between()
        for place, runner in enumerate(runners):
            progress(runner.name, number * len(runners) + place, total)
            _one_round(runner, number, rounds, device)
    progress("done", total, total)


def what_ran(
    model: Any, options: CommonOptions, runners: Sequence[Trial], packages: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the fields of `Measured`; `packages` are further packages whose versions are added, if
    installed.
    """
    patches, device = patch_report(model), torch.device(options.device)
    others = {name: found for name in packages if (found := installed(name)) is not None}
    return {
        "model": f"{type(model).__name__} ({options.model})",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "device": name_of(device),
        "dtype": dtype_name(next(model.parameters()).dtype),
        "versions": patches.versions | others,
        "candidates": tuple(runner.done() for runner in runners),
        "memory": HOW["cuda" if device.type == "cuda" else "cpu"],
        "implementations": patches.implementations,
    }


def _runners(model: Any, options: BenchOptions, device: torch.device) -> list[Trial]:
    rows, row, row_by_positions = _batches(model, options, device)
    family = family_of(model)
    attends_only = family is not None and family.attends_only
    note = (
        "exact, through a T x T mask"
        if attends_only
        else "exact only with kernels that are installed apart"
    )
    unpatched = Trial(OPTIONAL, model, row, patched=False, note=note)
    unpatched.attempt(unpatched.step)
    if unpatched.refused is not None and not unpatched.full:
        note = (
            "leaks: position_ids alone, because the collator's boundaries are refused "
            f"({unpatched.refused})"
        )
        unpatched = replace(unpatched, batch=row_by_positions, refused=None, note=note)
    return [
        Trial(BASE, model, rows, patched=False),
        unpatched,
        Trial("patched padded", model, rows, patched=True),
        Trial("patched packed", model, row, patched=True),
    ]


def _batches(model: Any, options: BenchOptions, device: torch.device) -> tuple[dict[str, Any], ...]:
    """Return the documents padded, packed, and packed by positions alone; with images where the
    model takes them.
    """
    documents = documents_of(
        options.lengths, model.config.get_text_config().vocab_size, options.seed
    )
    source = media_source(model)
    if source is None:
        return (
            padded(documents, device),
            packed(documents, device),
            packed(documents, device, boundaries=False),
        )
    given, dtype = illustrated(documents, source, options.seed), next(source.parameters()).dtype
    return (
        padded_media(given, source, device, dtype),
        packed_media(given, source, device, dtype),
        packed_media(given, source, device, dtype, boundaries=False),
    )


def _one_round(runner: Trial, number: int, rounds: int, device: torch.device) -> None:
    """Run one candidate's step: round 0 is the warm-up, the last measures memory, and those in
    between are timed.
    """

    def timed() -> None:
        began = _now(device)
        runner.step()
        runner.seconds.append(_now(device) - began)

    def memory() -> None:
        runner.model.zero_grad(set_to_none=True)
        runner.peak = peak_mib(runner.step, device, has_graphs=runner.patched)

    runner.attempt(runner.step if number == 0 else memory if number == rounds - 1 else timed)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
