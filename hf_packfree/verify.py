"""The leak, measured: packed against one by one, with a control that must fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree.errors import BlindMeasurement, LeakDetected, UnsupportedModel
from hf_packfree.patching.apply import apply_patches, patches_lifted
from hf_packfree.patching.building import build_model
from hf_packfree.patching.plan import trunks
from hf_packfree.patching.registry import FAMILIES, family_of
from hf_packfree.patching.report import patch_report

LENGTHS = (5, 64, 1, 129, 3, 63, 65)
"""Documents shorter than the convolution, around the 64-token chunk, and of one token."""


@dataclass(frozen=True)
class Limits:
    """The largest relative RMS that counts as rounding; a leak with slow decay is between 0.1 and 2."""

    logits: float
    gradients: float
    influence: float


LIMITS = {
    torch.float64: Limits(1e-5, 1e-4, 1e-5),
    torch.float32: Limits(1e-5, 1e-4, 1e-5),
    torch.bfloat16: Limits(5e-2, 5e-1, 5e-2),
    torch.float16: Limits(5e-2, 5e-1, 5e-2),
}
"""Measured on the tiny models: fp32 3e-7, 5e-6, 0; bf16 1e-2, 2e-1 (experts chosen differently), 0.  Stock: 0.1, 0.6, 0.1."""


@dataclass(frozen=True)
class Measurement:
    """One model on one packed row.

    Attributes:
        logits: relative RMS of all outputs against the documents run one by one.
        gradients: the same for the worst parameter's gradient; None when not asked for.
        worst_parameter: its name.
        influence: relative RMS by which documents 1, 3, 5 ... change when the tokens of documents 0, 2, 4 ... do.
        cross_gradient: largest gradient of the last document's outputs with respect to another's inputs.
        per_document: `logits` for each document alone.
    """

    logits: float
    gradients: float | None
    worst_parameter: str | None
    influence: float
    cross_gradient: float | None
    per_document: tuple[float, ...]


@dataclass(frozen=True)
class PackingReport:
    """What `verify_packing` measured.

    Attributes:
        model, family, device, dtype: what was measured.
        lengths: tokens of each document in the row.
        patched: the model as it is.
        stock: the same weights without patches: the control. None when it was not asked for.
        limits: what counts as rounding for the dtype.
    """

    model: str
    family: str
    device: str
    dtype: str
    lengths: tuple[int, ...]
    patched: Measurement
    stock: Measurement | None
    limits: Limits

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return asdict(self)

    def failures(self) -> list[str]:
        """Return a sentence per number above its limit; NaN is above every limit."""
        found, limits = self.patched, self.limits
        checks = [
            ("logits differ from one-by-one", found.logits, limits.logits),
            ("a gradient differs from one-by-one", found.gradients, limits.gradients),
            ("documents react to each other's tokens", found.influence, limits.influence),
            ("a gradient reaches another document", found.cross_gradient, 0.0),
        ]
        return [
            f"{what}: {value:.1e}, allowed {limit:.0e}"
            for what, value, limit in checks
            if value is not None and not value <= limit
        ]

    def __str__(self) -> str:
        stock = "" if self.stock is None else f"; stock: {self.stock.logits:.1e}"
        gradients = "" if self.patched.gradients is None else f", gradients within {self.patched.gradients:.1e}"
        return (
            f"{self.model} ({self.dtype}, {self.device}): {len(self.lengths)} packed documents equal one-by-one, logits "
            f"within {self.patched.logits:.1e} relative RMS{gradients}{stock}"
        )


def verify_packing(
    model: nn.Module | str | Path | Any,
    *,
    lengths: Sequence[int] = LENGTHS,
    gradients: bool = True,
    control: bool = True,
    slow_decay: bool = True,
    seed: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> PackingReport:
    """Measure whether packed documents influence each other.

    Random documents are packed into one row with restarting `position_ids`, the form that leaks in every release of
    transformers, and compared with the same documents run one by one.  Weights, gradients and modes of a model passed
    as an object are as before afterwards.

    Args:
        model: a model, measured as it is, on its own device and dtype; or a config, a checkpoint folder, a hub id or
            the name of a built-in tiny model ("qwen3_5"), which is built, patched and measured.
        lengths: tokens of each document, two or more.
        gradients: also compare every trainable parameter's gradient (takes twice the parameters' memory).
        control: also measure the same weights without patches, which must leak.
        slow_decay: for the measurement, let recurrent states live long (A from 0.01 to 0.05): the fast decay of random
            weights hides leaks.
        seed: of the documents.
        device, dtype: for a model that is built here; a model object keeps its own.
        trust_remote_code: for a hub id or folder with code of its own.

    Raises:
        LeakDetected: a number is above its limit, or is NaN; `.report` has all numbers.
        BlindMeasurement: the control does not leak, so the measurement could not see a leak.
        UnsupportedModel: no supported text model is inside.
    """
    if len(lengths) < 2:
        raise ValueError(f"found lengths={list(lengths)}; wanted two documents or more, since one cannot leak")
    if not isinstance(model, nn.Module):
        model = apply_patches(build_model(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code))
    family = family_of(model)
    if family is None:
        raise UnsupportedModel(
            f"found a {type(model).__name__}, which holds no text model of a supported family; wanted one of "
            f"{', '.join(row.name for row in FAMILIES)}"
        )
    probe = _Probe(model, next(trunks(model, family)), tuple(lengths), gradients, seed)
    with _prepared(model, slow_decay):
        patched = probe.measure()
        stock = _control(model, probe) if control else None
    report = PackingReport(
        model=type(model).__name__,
        family=family.name,
        device=str(probe.device),
        dtype=str(probe.dtype).removeprefix("torch."),
        lengths=probe.lengths,
        patched=patched,
        stock=stock,
        limits=LIMITS[probe.dtype],
    )
    _judge(report, model)
    return report


def _judge(report: PackingReport, model: nn.Module) -> None:
    failures = report.failures()
    if failures:
        advice = "report it" if patch_report(model).patched else "call apply_patches(model) first"
        raise LeakDetected(
            f"found documents that influence each other in {report.model}: {'; '.join(failures)}; wanted documents as if "
            f"run one by one; {advice}",
            report,
        )
    if report.stock is not None and not report.stock.logits > max(report.limits.logits, 10 * report.patched.logits):
        raise BlindMeasurement(
            f"found a control (the unpatched model) that differs from one-by-one by only {report.stock.logits:.1e}; wanted a "
            "leak far above the limit, so that this measurement can be believed; pass slow_decay=True or longer documents"
        )


def _control(model: nn.Module, probe: _Probe) -> Measurement | None:
    if not patch_report(model).patched:
        return None
    with patches_lifted(model):
        return probe.measure()


class _Probe:
    """Fixed documents and a fixed random functional of the outputs, for one model."""

    def __init__(
        self, model: nn.Module, trunk: nn.Module, lengths: tuple[int, ...], gradients: bool, seed: int
    ) -> None:
        self.lengths, self.gradients = lengths, gradients
        embedding = trunk.embed_tokens.weight
        self.device, self.dtype = embedding.device, embedding.dtype
        self.model = model if _answers_per_token(model) else trunk
        self.embed = trunk.embed_tokens
        self.generator = torch.Generator().manual_seed(seed)
        self.ids = self._random_ids(trunk.config.vocab_size)
        self.other_ids = self._random_ids(trunk.config.vocab_size)
        self.positions = torch.cat([torch.arange(n) for n in lengths])[None].to(self.device)
        self.weights: Tensor | None = None

    def measure(self) -> Measurement:
        alone, alone_gradients = self._alone()
        packed, packed_gradients, cross = self._packed()
        worst, name = self._worst(packed_gradients, alone_gradients)
        parts = zip(packed.split(self.lengths), alone.split(self.lengths), strict=True)
        return Measurement(
            logits=relative_rms(packed, alone),
            gradients=worst,
            worst_parameter=name,
            influence=self._influence(packed),
            cross_gradient=cross,
            per_document=tuple(relative_rms(found, wanted) for found, wanted in parts),
        )

    def _alone(self) -> tuple[Tensor, dict[str, Tensor]]:
        outputs, total = [], dict[str, Tensor]()
        start = 0
        for ids in self.ids.split(self.lengths, dim=1):
            output = self._run(ids=ids)
            weights = self._functional(output)[start : start + ids.shape[1]]
            for name, gradient in self._gradients((output * weights).sum()).items():
                total[name] = total[name] + gradient if name in total else gradient
            outputs.append(output.detach())
            start += ids.shape[1]
        return torch.cat(outputs), total

    def _packed(self) -> tuple[Tensor, dict[str, Tensor], float | None]:
        if not self.gradients:
            return self._run(ids=self.ids, positions=self.positions).detach(), {}, None
        output = self._run(ids=self.ids, positions=self.positions)
        gradients = self._gradients((output * self._functional(output)).sum())
        return output.detach(), gradients, self._cross_gradient()

    def _cross_gradient(self) -> float:
        embeds = self.embed(self.ids).detach().requires_grad_()
        output = self._run(embeds=embeds, positions=self.positions)
        last = self.lengths[-1]
        (gradient,) = torch.autograd.grad((output * self._functional(output))[-last:].sum(), embeds)
        return float(gradient[:, :-last].abs().max())

    @torch.no_grad()
    def _influence(self, before: Tensor) -> float:
        number = torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths)).to(self.device)
        kept = number % 2 == 1
        after = self._run(ids=torch.where(kept, self.ids, self.other_ids), positions=self.positions)
        return relative_rms(after[kept], before[kept])

    def _run(self, *, ids: Tensor | None = None, embeds: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Return [T, width]: logits, or hidden states where the model has no logits per token."""
        given = {"input_ids": ids} if embeds is None else {"inputs_embeds": embeds}
        with nullcontext() if self.gradients else torch.no_grad():
            output = self.model(**given, position_ids=positions, use_cache=False)
        tokens: Tensor = output.logits if "logits" in output else output.last_hidden_state
        return tokens[0]

    def _functional(self, like: Tensor) -> Tensor:
        if self.weights is None:
            shape = (sum(self.lengths), like.shape[-1])
            self.weights = torch.randn(shape, generator=self.generator).to(like)
        return self.weights

    def _gradients(self, loss: Tensor) -> dict[str, Tensor]:
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad} if self.gradients else {}
        if not trained:
            return {}
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        return {name: gradient for name, gradient in zip(trained, found, strict=True) if gradient is not None}

    def _worst(self, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float | None, str | None]:
        """Return the largest relative error of a gradient, and whose.

        Some gradients are zero but for rounding (queries of one-token documents); sizes below a hundredth of
        the median parameter's count as that.
        """
        if not wanted:
            return None, None
        sizes = {name: float(gradient.double().pow(2).mean().sqrt()) for name, gradient in wanted.items()}
        floor = 1e-2 * sorted(sizes.values())[len(sizes) // 2]
        errors = dict.fromkeys(found.keys() ^ wanted.keys(), float("inf"))
        for name in found.keys() & wanted.keys():
            difference = float((found[name].double() - wanted[name].double()).pow(2).mean().sqrt())
            errors[name] = difference / max(sizes[name], floor) if difference else 0.0
        name = max(errors, key=lambda key: float("inf") if errors[key] != errors[key] else errors[key])
        return errors[name], name

    def _random_ids(self, vocabulary: int) -> Tensor:
        return torch.randint(0, vocabulary, (1, sum(self.lengths)), generator=self.generator).to(self.device)


def relative_rms(found: Tensor, wanted: Tensor) -> float:
    """Return the root mean square of `found - wanted` over that of `wanted`; 0 when both are all zero."""
    difference = (found.double() - wanted.double()).pow(2).mean().sqrt()
    size = wanted.double().pow(2).mean().sqrt()
    return float(difference / size) if float(size) else float(difference)


def _answers_per_token(model: nn.Module) -> bool:
    """Whether the model's own output has one row per token; heads that pool a row are measured at their trunk."""
    pooled = ("SequenceClassification", "QuestionAnswering")
    return not any(kind in type(module).__name__ for module in model.modules() for kind in pooled)


@contextmanager
def _prepared(model: nn.Module, slow_decay: bool) -> Iterator[None]:
    """Evaluation mode and slow decay for the block; everything as before afterwards."""
    modes = {module: module.training for module in model.modules()}
    decays = {p: p.detach().clone() for name, p in model.named_parameters() if slow_decay and name.endswith("A_log")}
    model.eval()
    try:
        with torch.no_grad():
            for parameter in decays:
                parameter.copy_(torch.linspace(0.01, 0.05, parameter.numel()).log())
        yield
    finally:
        with torch.no_grad():
            for parameter, before in decays.items():
                parameter.copy_(before)
        for module, training in modes.items():
            module.training = training
