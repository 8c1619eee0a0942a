"""One model on one packed row: outputs, gradients and influence against the same documents alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree.verify.report import Measurement, relative_rms


class Probe:
    """Fixed documents and a fixed random functional of the outputs, for one model.

    Args:
        reference: the context in which documents run alone, for models that run them in the patched layers otherwise.

    Attributes:
        packages: after a measurement, the top-level packages whose functions ran in it.
    """

    def __init__(
        self,
        model: nn.Module,
        trunk: Any,
        lengths: tuple[int, ...],
        gradients: bool,
        seed: int,
        reference: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.reference = reference
        self.lengths, self.gradients = lengths, gradients
        embedding: Tensor = trunk.embed_tokens.weight
        self.device, self.dtype = embedding.device, embedding.dtype
        self.model = model if _answers_per_token(model) else trunk
        self.embed = trunk.embed_tokens
        self.generator = torch.Generator().manual_seed(seed)
        self.ids = self._random_ids(trunk.config.vocab_size)
        self.other_ids = self._random_ids(trunk.config.vocab_size)
        self.positions = torch.cat([torch.arange(n) for n in lengths])[None].to(self.device)
        self.weights: Tensor | None = None
        self.packages: frozenset[str] = frozenset()

    def measure(self) -> Measurement:
        with self.reference():
            alone, alone_gradients = self._alone()
        packed, packed_gradients, cross = self._packed()
        worst, name = self._worst(packed_gradients, alone_gradients)
        with packages_called() as packages:
            influence = self._influence(packed)
            self._first_alone()
        self.packages = frozenset(packages)
        parts = zip(packed.split(self.lengths), alone.split(self.lengths), strict=True)
        return Measurement(
            logits=relative_rms(packed, alone),
            gradients=worst,
            worst_parameter=name,
            influence=influence,
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
    def _first_alone(self) -> None:
        self._run(ids=self.ids[:, : self.lengths[0]])

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


def _answers_per_token(model: nn.Module) -> bool:
    """Whether the model's own output has one row per token; heads that pool a row are measured at their trunk."""
    pooled = ("SequenceClassification", "QuestionAnswering")
    return not any(kind in type(module).__name__ for module in model.modules() for kind in pooled)


@contextmanager
def packages_called() -> Iterator[set[str]]:
    """Collect, for the block, the top-level packages whose Python functions are called in this thread."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            found.add(str(frame.f_globals.get("__name__")).partition(".")[0])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)


@contextmanager
def prepared(model: nn.Module, slow_decay: bool) -> Iterator[None]:
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
