"""The numbers of one verification, and the limits of rounding."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Limits:
    """The largest relative RMS that counts as rounding; a leak with slow decay is between 0.1
    and 2.
    """

    logits: float
    gradients: float
    influence: float

    def at_least(self, logits: float, gradients: float) -> Limits:
        """Return limits that are at least the given, measured rounding errors."""
        return replace(
            self, logits=max(self.logits, logits), gradients=max(self.gradients, gradients)
        )


LIMITS = {
    torch.float64: Limits(1e-5, 1e-4, 1e-5),
    torch.float32: Limits(1e-5, 1e-4, 1e-5),
    torch.bfloat16: Limits(5e-2, 5e-1, 5e-2),
    torch.float16: Limits(5e-2, 5e-1, 5e-2),
}
"""Measured on the tiny models: fp32 3e-7, 5e-6, 0; bf16 1e-2, 2e-1 (experts chosen differently),
0; unpatched 0.1, 0.6, 0.1.
"""
TF32 = Limits(1e-3, 5e-2, 1e-5)
"""For fp32 on a GPU where matrix products round to TF32, as flash-linear-attention's always do.

Measured on an H200: 1.4e-4, 1e-3, 0.  Unpatched: 0.3, 1.1, 0.2.
"""


def limits_for(device: torch.device, dtype: torch.dtype, packages: Collection[str] = ()) -> Limits:
    """Return the limits of rounding for a device and dtype; `packages` are the top-level packages
    whose functions ran, such as "fla".
    """
    # not `get_float32_matmul_precision`, which raises after `TrainingArguments(tf32=True)`
    rounds = torch.backends.cuda.matmul.fp32_precision not in ("none", "ieee")
    tf32 = "fla" in packages or rounds
    return TF32 if (device.type, dtype) == ("cuda", torch.float32) and tf32 else LIMITS[dtype]


def relative_rms(found: Tensor, wanted: Tensor) -> float:
    """Return the root mean square of `found - wanted` over that of `wanted`; 0 when both are all
    zero.
    """
    difference = (found.double() - wanted.double()).pow(2).mean().sqrt()
    size = wanted.double().pow(2).mean().sqrt()
    return float(difference / size) if float(size) else float(difference)


@dataclass(frozen=True)
class Measurement:
    """The numbers of one model on one packed row.

    Attributes:
        logits: relative RMS of all outputs against a forward per document.
        gradients: relative RMS of the gradient of the worst parameter; None if not measured.
        worst_parameter: the name of that parameter.
        influence: relative RMS by which documents 1, 3, 5 ... change when the tokens, pixels and
            audio of documents 0, 2, 4 ... do, or the other way round, whichever is larger.
        cross_gradient: largest gradient of any document's outputs with respect to another's inputs.
        per_document: `logits` for each document.
        prefix_gradient: in a tree, largest gradient of the outputs of the last sample's own segment
            with respect to the prefix that it shares; None elsewhere.
    """

    logits: float
    gradients: float | None
    worst_parameter: str | None
    influence: float
    cross_gradient: float | None
    per_document: tuple[float, ...]
    prefix_gradient: float | None = None


@dataclass(frozen=True)
class PackingReport:
    """What `verify_packing` measured.

    Attributes:
        model: the class that was measured.
        family: the model's family, by its name here, or else in transformers.
        device: the model's.
        dtype: of its parameters.
        lengths: tokens of each document in the row; of each sample in a tree.
        patched: the numbers of the model as it was given, or patched if it was built here.
        unpatched: the control, the same weights without patches; None without a control. Its
            influence and cross gradient are those of documents 0, 2, 4 ... on the others alone,
            since it only has to leak.
        limits: the limits of rounding, which depend on the dtype and on the kernels that ran. In
            half precision, where packed documents exceed these, at least twice the effect of
            rounding the embeddings once on documents alone.
        media: the kinds in the documents, of "image", "video" and "audio".
        autocast: the dtype that `torch.autocast` computed in, or None outside of it.
        tree: whether the row was a tree of shared prefixes, whose samples count as documents.
        not_patched: why the model was measured unpatched; None where it can be patched.
        jitter: fields of the config, with their values, for noise in training, packed or not;
            the model was measured in evaluation mode, without this noise.
    """

    model: str
    family: str
    device: str
    dtype: str
    lengths: tuple[int, ...]
    patched: Measurement
    unpatched: Measurement | None
    limits: Limits
    media: tuple[str, ...] = ()
    autocast: str | None = None
    tree: bool = False
    not_patched: str | None = None
    jitter: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return asdict(self)

    @property
    def _inputs(self) -> str:
        return _and("tokens", *(f"{kind}s" for kind in self.media))

    def failures(self) -> list[str]:
        """Return a sentence per number above its limit; NaN is above every limit."""
        found, limits = self.patched, self.limits
        checks = [
            ("logits differ from a forward per document", found.logits, limits.logits),
            ("a gradient differs from a backward per document", found.gradients, limits.gradients),
            (f"documents react to each other's {self._inputs}", found.influence, limits.influence),
            ("a gradient reaches another document", found.cross_gradient, 0.0),
        ]
        above = [
            f"{what}: {value:.1e}, allowed {limit:.0e}"
            for what, value, limit in checks
            if value is not None and not value <= limit
        ]
        deaf = found.prefix_gradient is not None and not found.prefix_gradient > 0
        return [*above, "no gradient reaches a shared prefix"] if deaf else above

    @property
    def what(self) -> str:
        """The contents of the row, in words."""
        return "prefix-sharing samples" if self.tree else "packed documents"

    @property
    def _with_media(self) -> str:
        return f" with {_and(*(f'{kind}s' for kind in self.media))}" if self.media else ""

    def __str__(self) -> str:
        gradients = (
            ""
            if self.patched.gradients is None
            else f", gradients within {self.patched.gradients:.1e}"
        )
        unpatched = "" if self.unpatched is None else f"; unpatched: {self.unpatched.logits:.1e}"
        dtype = f"{self.dtype}{f' in {self.autocast} autocast' if self.autocast else ''}"
        return (
            f"{self.model} ({dtype}, {self.device}): {len(self.lengths)} "
            f"{self.what}{self._with_media} equal the same {self.what.split()[-1]} alone, logits "
            "within "
            f"{self.patched.logits:.1e} relative RMS{gradients}{unpatched}{self.why}"
        )

    @property
    def why(self) -> str:
        """Say why the model is not patched, where it cannot be, and which noise of training was
        left out.
        """
        why = "" if self.not_patched is None else f"; it is not patched: {self.not_patched}"
        if not self.jitter:
            return why
        return (
            f"{why}; measured without {_and(*self.jitter)}, by which training steps differ from "
            "one to the next, packed or not"
        )


def _and(*words: str) -> str:
    """Return "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
