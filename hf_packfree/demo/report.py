"""What the demo is asked for and what it measured, as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_packfree.errors import PackFreeError

LOSS_LIMIT = 1e-4
"""Largest relative loss difference, padded against packed, that counts as fp32 rounding.

AdamW amplifies rounding from step to step.  Measured over 60 and 100 steps: packed against padded 3e-6 and 1.5e-5, padded
against padded with other padding (`pad_to_multiple_of=64`) 7e-6 and 3e-5, leaking against padded 1e-2 and 3e-2.
"""

JUDGED_STEPS = 60
"""The limit holds for so many steps; later ones are shown and not judged."""


class DemoError(PackFreeError, RuntimeError):
    """A training process of the demo ended before it was done."""


@dataclass(frozen=True)
class DemoOptions:
    """What `run_demo` takes.

    Attributes:
        out: the folder to write; made if it is missing.
        steps: optimizer steps of each training.
        batch_size: documents per step.
        seed: of the weights, the choice of documents and their order.
        threads: CPU threads; one, because matrices this small gain little from more and cores that are shared lose a lot.
        plots: whether to draw the pictures.
    """

    out: Path = Path("packfree-demo")
    steps: int = 60
    batch_size: int = 8
    seed: int = 0
    threads: int = 1
    plots: bool = True


@dataclass(frozen=True)
class Stage:
    """How far one stage of the demo is: `done` of `total`, and a word on it."""

    name: str
    done: int
    total: int
    note: str = ""


Progress = Callable[[Stage], None]


@dataclass(frozen=True)
class Corpus:
    """The documents that were trained on; lengths in tokens."""

    source: str
    documents: int
    tokens: int
    vocabulary: int
    shortest: int
    median: int
    longest: int


@dataclass(frozen=True)
class Training:
    """One training, in a process of its own.

    Attributes:
        name: "padded", "packed" or "unpatched".
        title: the same for people.
        losses, gradient_norms: of every step, from the Trainer's log.
        documents, tokens, slots, targets: per step; slots are tokens and padding, targets what the loss averages over.
        fingerprints: per step, the sum of all real token ids: equal when the documents are.
        seconds: per step; the first holds the warm-up.
        tokens_per_second: real tokens, without the first step.
        peak_memory_mib: highest resident memory (on a GPU: highest allocated memory) while training, above what the process
            held when the model was loaded and the first step began.
        device: where it ran.
        packing: what PackFreeCallback added to the last log, empty without it.
    """

    name: str
    title: str
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    documents: tuple[int, ...]
    tokens: tuple[int, ...]
    slots: tuple[int, ...]
    targets: tuple[int, ...]
    fingerprints: tuple[int, ...]
    seconds: tuple[float, ...]
    tokens_per_second: float
    peak_memory_mib: float
    device: str
    packing: dict[str, float]

    @property
    def real_share(self) -> float:
        """Share of the model's work that is real tokens, 0 to 1."""
        return sum(self.tokens) / sum(self.slots)

    def loss_differences(self, other: Training) -> list[float]:
        """Return per step the relative difference of this loss to the other's."""
        return [abs(mine - its) / abs(its) for mine, its in zip(self.losses, other.losses, strict=True)]


@dataclass(frozen=True)
class DemoReport:
    """Everything the demo measured.

    Attributes:
        options, versions: how and with what it ran.
        corpus: the documents.
        parameters: of the model.
        verification: `PackingReport.as_dict()` of the model before training, stock beside patched; its `lengths` are the
            first documents'.
        leaks: what verification found wrong with the patched model; empty when nothing.
        padded, packed, unpatched: the three trainings.
        files: what was written, relative to `options.out`.
        seconds: of the whole demo.
    """

    options: DemoOptions
    versions: dict[str, str | None]
    corpus: Corpus
    parameters: int
    verification: dict[str, Any]
    leaks: tuple[str, ...]
    padded: Training
    packed: Training
    unpatched: Training
    files: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def trainings(self) -> tuple[Training, Training, Training]:
        """Padded, packed, unpatched."""
        return self.padded, self.packed, self.unpatched

    @property
    def speedup(self) -> float:
        """Real tokens per second, packed over padded."""
        return self.packed.tokens_per_second / self.padded.tokens_per_second

    @property
    def memory_ratio(self) -> float:
        """Peak training memory, packed over padded."""
        return self.packed.peak_memory_mib / max(self.padded.peak_memory_mib, 1e-9)

    @property
    def difference(self) -> float:
        """Largest relative loss difference of packed to padded over the judged steps; NaN if any is."""
        return _largest(self.packed.loss_differences(self.padded)[:JUDGED_STEPS])

    @property
    def leaking_difference(self) -> float:
        """The same of packing without patches."""
        return _largest(self.unpatched.loss_differences(self.padded)[:JUDGED_STEPS])

    def failures(self) -> list[str]:
        """Return a sentence per thing that is not as promised."""
        padded, packed = self.padded, self.packed
        checks = [
            (packed.fingerprints == padded.fingerprints, "packed and padded training did not see the same documents"),
            (packed.targets == padded.targets, "packed and padded training did not average over the same targets"),
            (
                self.difference <= LOSS_LIMIT,
                f"the loss curves differ by {self.difference:.1e} relative, allowed {LOSS_LIMIT:.0e}",
            ),
            (
                self.leaking_difference > 10 * self.difference,
                f"the control (packing without patches) differs by only {self.leaking_difference:.1e}, which proves nothing",
            ),
        ]
        return [*self.leaks, *(sentence for holds, sentence in checks if not holds)]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON, with the verdict."""
        data = asdict(self)
        data["options"]["out"] = str(self.options.out)
        data["verdict"] = {
            "largest_relative_loss_difference": self.difference,
            "unpatched_relative_loss_difference": self.leaking_difference,
            "limit": LOSS_LIMIT,
            "judged_steps": min(JUDGED_STEPS, len(self.padded.losses)),
            "tokens_per_second_ratio": self.speedup,
            "peak_memory_ratio": self.memory_ratio,
            "failures": self.failures(),
            "sentence": str(self),
        }
        return data

    def __str__(self) -> str:
        failures = self.failures()
        if failures:
            return f"The demo's check failed: {'; '.join(failures)}."
        return (
            f"Packed training equals padded training: loss curves within {self.difference:.0e} of each other over "
            f"{min(JUDGED_STEPS, len(self.padded.losses))} steps (without patches {self.leaking_difference:.0e}), at "
            f"{self.speedup:.1f} times the tokens per second in {self.memory_ratio:.2f} times the memory."
        )


def _largest(values: list[float]) -> float:
    return next((value for value in values if value != value), max(values))
