"""The options and results of a benchmark, as plain data."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

BASE = "unpatched padded"
OPTIONAL = "unpatched packed"
Progress = Callable[[str, int, int], None]
"""Called with a candidate's name, the number of steps done, and the number of all steps."""


@dataclass(frozen=True)
class CommonOptions:
    """The options of every benchmark.

    Attributes:
        model: a preset, a family's name, a config or checkpoint folder, or a hub id.
        lengths: tokens of each document of the batch, or of each segment of its tree.
        rounds: timed steps of each candidate; candidates take turns.
        device, dtype: of the model; dtype None is the checkpoint's own, or the preset's, see
            `model_of`.
        threads: CPU threads; None leaves torch's choice.
        seed: of random weights and tokens.
        trust_remote_code: run code that comes with a checkpoint.
    """

    model: str
    lengths: tuple[int, ...]
    rounds: int = 5
    device: str = "cpu"
    dtype: str | None = None
    threads: int | None = None
    seed: int = 0
    trust_remote_code: bool = False


@dataclass(frozen=True)
class BenchOptions(CommonOptions):
    """The options of `run_bench`.

    Attributes:
        origin, cut: from `choose_lengths`, for the report: where the lengths come from, and how
            many documents were cut.
    """

    origin: str = ""
    cut: int = 0


@dataclass(frozen=True)
class Candidate:
    """One way to run a training step, forward and backward, on the same documents.

    Attributes:
        name: unpatched or patched, padded or packed.
        computed_tokens: including padding, where padding is not skipped.
        seconds: of each timed step.
        peak_mib: most memory held during a step above what was held before it, gradients included,
            and what CUDA graphs keep.
        refused: why the candidate does not run here, or None.
        note: a remark on the candidate, for the report.
    """

    name: str
    computed_tokens: int
    seconds: tuple[float, ...] = ()
    peak_mib: float | None = None
    refused: str | None = None
    note: str = ""

    @property
    def median(self) -> float | None:
        """Seconds of the median step."""
        return statistics.median(self.seconds) if self.seconds else None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The fields of every benchmark's report.

    Attributes:
        model, parameters, device, dtype, versions: the model and where it ran.
        candidates: in the order of their turns.
        memory: how the peak was measured.
        implementations: {operation: backend that ran the patched rows}.
    """

    model: str
    parameters: int
    device: str
    dtype: str
    versions: dict[str, str | None]
    candidates: tuple[Candidate, ...]
    memory: str
    implementations: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BenchReport(Measured):
    """The results of `run_bench`, the unpatched padded candidate first.

    Attributes:
        options: see `BenchOptions`.
        floor: seconds that the model's linear layers and experts alone take for the real tokens:
            one multiplication forward, two backward, each measured in the same run.
        images, patches: their numbers in all documents, where the model takes images.
    """

    options: BenchOptions
    floor: float
    images: int = 0
    patches: int = 0

    @property
    def real_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(self.options.lengths)

    @property
    def fill(self) -> float:
        """Share of real tokens in the padded batch, 0 to 1."""
        return self.real_tokens / (max(self.options.lengths) * len(self.options.lengths))

    @property
    def documents(self) -> str:
        """How many documents, in words, and how many of them were cut."""
        lengths, cut = self.options.lengths, self.options.cut
        images = f" with {self.images} images" if self.images else ""
        return f"{len(lengths)} documents{images}" + (
            f" ({cut} cut to {max(lengths):,} tokens)" if cut else ""
        )

    @property
    def complete(self) -> bool:
        """Whether every candidate ran, except unpatched packed, which transformers refuses without
        kernels installed.
        """
        return not any(row.refused for row in self.candidates if row.name != OPTIONAL)

    def candidate(self, name: str) -> Candidate:
        """Return the candidate of this name."""
        return next(row for row in self.candidates if row.name == name)

    def faster(self, name: str) -> float | None:
        """Return how many times as fast as unpatched padded a candidate is."""
        base, found = self.candidate(BASE).median, self.candidate(name).median
        return base / found if base and found else None

    def _packed_faster(self) -> float | None:
        """Return how many times as fast as unpatched packed, where that ran, patched packed is."""
        medians = {row.name: row.median for row in self.candidates}
        before, after = (medians.get(f"{way} packed") for way in ("unpatched", "patched"))
        return before / after if before and after else None

    def memory_share(self, name: str) -> float | None:
        """Return a candidate's peak as a share of unpatched padded's."""
        base, found = self.candidate(BASE).peak_mib, self.candidate(name).peak_mib
        return found / base if base and found is not None else None

    def tokens_per_second(self, name: str) -> float | None:
        """Return real tokens per second."""
        median = self.candidate(name).median
        return self.real_tokens / median if median else None

    def floor_share(self, name: str) -> float | None:
        """Return the share of a candidate's step that its matrix products take, 0 to 1."""
        median = self.candidate(name).median
        return self.floor / median if median else None

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        rows = [
            {
                **asdict(row),
                "median_ms": None if row.median is None else row.median * 1e3,
                "times_as_fast": self.faster(row.name),
                "memory_share": self.memory_share(row.name),
                "tokens_per_second": self.tokens_per_second(row.name),
                "floor_share": self.floor_share(row.name),
            }
            for row in self.candidates
        ]
        facts = {"real_tokens": self.real_tokens, "fill": self.fill, "sentence": str(self)}
        return {**asdict(self), **facts, "candidates": rows}

    def __str__(self) -> str:
        faster, share = self.faster("patched padded"), self.memory_share("patched padded")
        what = f"{self.model} on {self.device}, {self.documents}, {self.fill:.0%} real tokens"
        if faster is None or share is None:
            broken = next(
                row
                for row in self.candidates
                if row.refused and row.name in (BASE, "patched padded")
            )
            return f"{what}: no comparison, because {broken.name} did not run ({broken.refused})"
        packed = self._packed_faster()
        return (
            f"{what}: once patched, a padded step is {faster:.2f} times as fast, in {share:.0%} of "
            "the peak memory"
            + (f"; a packed one {packed:.2f} times as fast as unpatched packed" if packed else "")
        )
