"""The demo's options and results, as plain data."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_packfree.verify import PackingReport

PADDED = "padded"
LEAKING = "packed, unpatched"
PACKED = "packed, patched"

LOSS_LIMIT = 1e-4
"""Largest relative loss difference, padded against packed, that counts as fp32 rounding.

AdamW amplifies rounding from step to step. Measured over 60 and 100 steps: packed against padded
3e-6 and 1.5e-5, padded against padded with other padding (`pad_to_multiple_of=64`) 7e-6 and 3e-5,
leaking against padded 1e-2 and 3e-2.
"""
JUDGED_STEPS = 60
"""The limit holds for this many steps; later ones are shown and not judged."""

Progress = Callable[[str, int, int, str], None]
"""Called with the name of a stage, the number of its steps that are done, the number of all its
steps, and a remark.
"""


@dataclass(frozen=True)
class DemoOptions:
    """The options of `run_demo`.

    Attributes:
        out: the folder to write; made if it is missing.
        steps, batch_size: optimizer steps of each training, and documents per step.
        seed: of the weights, the choice of documents and their order.
        threads: CPU threads; one, because matrices this small gain little from more and shared
            cores lose a lot.
        plots: whether to draw the picture.
    """

    out: Path = Path("packfree-demo")
    steps: int = 40
    batch_size: int = 8
    seed: int = 0
    threads: int = 1
    plots: bool = True


@dataclass(frozen=True)
class Training:
    """One training; tuples hold a value per step.

    Attributes:
        name: `PADDED`, `LEAKING` or `PACKED`.
        losses: nats per token, from the Trainer's log.
        seconds: the first holds the warm-up.
        tokens, tokens_with_padding: tokens per step without and with padding.
        targets: tokens that the loss averages over.
        peak_mib: the most memory that one training step allocates, gradients included, and what
            CUDA graphs keep.
    """

    name: str
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    tokens: tuple[int, ...]
    tokens_with_padding: tuple[int, ...]
    targets: tuple[int, ...]
    peak_mib: float

    @property
    def real_share(self) -> float:
        """Share of tokens that are not padding, 0 to 1."""
        return sum(self.tokens) / sum(self.tokens_with_padding)

    @property
    def tokens_per_second(self) -> float:
        """Real tokens per second, without the first step if there are more."""
        return sum(self.tokens[1:] or self.tokens) / sum(self.seconds[1:] or self.seconds)

    def differences(self, other: Training) -> list[float]:
        """Return for each step the relative difference of this training's loss to the other's."""
        return [
            abs(mine - its) / abs(its) for mine, its in zip(self.losses, other.losses, strict=True)
        ]

    def difference(self, other: Training) -> float:
        """Return the largest of `differences` over the judged steps; NaN if any is NaN."""
        return max(
            self.differences(other)[:JUDGED_STEPS], key=lambda value: (math.isnan(value), value)
        )


@dataclass(frozen=True)
class Influence:
    """How much the documents of one packed row change each other's logits.

    Attributes:
        matrix: [reader][replaced document]: relative RMS by which the reader's logits change when
            the tokens of the other document are replaced; on the diagonal they change in any case.
    """

    matrix: tuple[tuple[float, ...], ...]

    @property
    def worst(self) -> float:
        """The largest influence of one document on another."""
        pairs = (
            value
            for reader, row in enumerate(self.matrix)
            for place, value in enumerate(row)
            if place != reader
        )
        return max(pairs, default=0.0)


@dataclass(frozen=True)
class Continuations:
    """How a model continues a prompt, greedily.

    Attributes:
        prompt: the text that is continued.
        alone: the continuation without other documents.
        unpatched, patched: the continuations in a packed row, after one neighbour and after
            another.
    """

    prompt: str
    alone: str
    unpatched: tuple[str, ...]
    patched: tuple[str, ...]


@dataclass(frozen=True)
class DemoReport:
    """Everything the demo measured.

    Attributes:
        options, versions, device: how, with which packages and where the demo ran.
        lengths: tokens of every document.
        parameters: of the model.
        verification: of the model before training, patched and unpatched, on the first step's
            documents.
        padded, packed, unpatched: the three trainings.
        leaking, exact: how much documents of a row change each other's logits in the trained model,
            without patches and with them.
        continuations: of the trained model, without patches and with them.
        files: the files written, relative to `options.out`.
        seconds: of the whole demo.
    """

    options: DemoOptions
    versions: dict[str, str | None]
    device: str
    lengths: tuple[int, ...]
    parameters: int
    verification: PackingReport
    padded: Training
    packed: Training
    unpatched: Training
    leaking: Influence
    exact: Influence
    continuations: Continuations
    files: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def trainings(self) -> tuple[Training, Training, Training]:
        """The trainings: padded, packed without patches, packed with patches."""
        return self.padded, self.unpatched, self.packed

    def failures(self) -> list[str]:
        """Return a sentence for each result that is not as promised."""
        padded, packed = self.padded, self.packed
        found, control = packed.difference(padded), self.unpatched.difference(padded)
        checks = {
            "packed and padded training did not see the same documents": packed.tokens
            == padded.tokens,
            "packed and padded training did not average over the same targets": packed.targets
            == padded.targets,
            f"the loss curves differ by {found:.1e} relative, allowed {LOSS_LIMIT:.0e}": found
            <= LOSS_LIMIT,
            f"the control (packing without patches) differs by only {control:.1e}, which proves "
            "nothing": control > 10 * found,
            "a continuation depends on the neighbour": len(set(self.continuations.patched)) == 1,
            f"documents influence each other by {self.exact.worst:.1e}": self.exact.worst
            <= self.verification.limits.influence,
        }
        return [
            *self.verification.failures(),
            *(sentence for sentence, holds in checks.items() if not holds),
        ]

    def harm(self) -> str:
        """Return in a sentence how much packing changes predictions, without patches and with
        them.
        """
        before, after = self.verification.unpatched, self.verification.patched
        said = (
            f"a document's predictions change by up to {self.leaking.worst:.1%} with its "
            f"neighbours' tokens (patched: {self.exact.worst:.0e})"
        )
        if before is not None and before.gradients is not None and after.gradients is not None:
            said = (
                f"the gradient of the worst parameter is {before.gradients:.0%} off (patched: "
                f"{after.gradients:.0e}), and {said}"
            )
        return f"Packed without patches, {said}."

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON, with the verdict."""
        data = asdict(self) | {"failures": self.failures(), "sentence": str(self)}
        data["harm"] = self.harm()
        # the folder
        text = json.dumps(data, default=str)
        # JSON has no NaN and no infinity
        return dict(json.loads(text, parse_constant=lambda name: None))

    def __str__(self) -> str:
        failures, padded, packed = self.failures(), self.padded, self.packed
        if failures:
            return f"The demo's check failed: {'; '.join(failures)}."
        return (
            "Packed training equals padded training: loss curves within "
            f"{packed.difference(padded):.0e} of each other over "
            f"{min(JUDGED_STEPS, len(padded.losses))} steps (without patches "
            f"{self.unpatched.difference(padded):.0e}), at "
            f"{packed.tokens_per_second / padded.tokens_per_second:.1f} times the tokens per "
            f"second in {packed.peak_mib / max(padded.peak_mib, 1e-9):.2f} times the memory."
        )
