"""One model on one packed row: outputs, gradients and influence against the same documents
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packfree.errors import BlindMeasurement
from hf_packfree.models.base import Replacement
from hf_packfree.models.linear_weights import autocast_dtype
from hf_packfree.models.media_keywords import FEATURES
from hf_packfree.verify.conditions import packages_called
from hf_packfree.verify.packing_report import Measurement, relative_rms
from hf_packfree.verify.random_documents import (
    MediaDocuments,
    TextDocuments,
    TreeDocuments,
    media_source,
    media_tokens,
)
from hf_packfree.verify.ranks import Ranks, settings_of


class Probe:
    """Fixed documents and a fixed random functional of the outputs, for one model.

    Args:
        reference: the context in which documents run alone; for models that would otherwise run
            them in the patched layers.
        dtype: by whose rounding differences are judged.
        masked: see `TextDocuments`.
        parents: where the documents are segments of a tree, see `TreeDocuments`.

    Attributes:
        halves: bool [N] each, see `_halves`, and in a tree the samples that share a segment, which
            the others must not reach; fewer of them show that something leaks, not where.
        autocast: the dtype that `torch.autocast` computes in, or None outside of it.
        packages: after a measurement, the top-level packages whose functions ran in it.
    """

    def __init__(
        self,
        model: nn.Module,
        trunk: Any,
        lengths: tuple[int, ...],
        gradients: bool,
        seed: int,
        reference: Callable[[], AbstractContextManager[Any]],
        dtype: torch.dtype,
        masked: bool,
        parents: Sequence[int | None] | None,
    ) -> None:
        self.reference, self.dtype = reference, dtype
        self.gradients = gradients
        self.embed: nn.Module = trunk.get_input_embeddings()
        embedding = next(self.embed.parameters())
        self.device = embedding.device
        self.autocast = autocast_dtype(self.device)
        self.model = model if _answers_per_token(model) else trunk
        self.generator = torch.Generator("cpu").manual_seed(seed)
        source, drawn = media_source(self.model), (self.generator, self.device)
        vocabulary, taken = trunk.config.vocab_size, _no_text(source, trunk.config)
        self.documents = (
            TreeDocuments(lengths, parents, vocabulary, *drawn, taken)
            if parents is not None
            else TextDocuments(
                lengths,
                vocabulary,
                *drawn,
                taken,
                masked=masked,
                positions=_takes_positions(self.model),
            )
            if source is None
            else MediaDocuments(lengths, source, *drawn, embedding.dtype)
        )
        self.lengths = self.documents.lengths
        self.halves = [*_halves(len(self.lengths)), *self.documents.shared]
        self.weights: Tensor | None = None
        self.packages: frozenset[str] = frozenset()

    def measure(self) -> Measurement:
        with self.reference():
            alone, alone_gradients = self._alone()
        self._refuse_no_numbers(
            {"the outputs": alone}
            | {f"the gradient of {name}": found for name, found in alone_gradients.items()}
        )
        packed, packed_gradients, cross, prefix = self._packed()
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
            prefix_gradient=prefix,
        )

    def rounding(self) -> tuple[float, float]:
        """Return the relative RMS by which documents alone change, in logits and in the worst
        parameter's gradient, if every number of the embeddings is moved by one rounding step, up or
        down.
        """
        step = torch.finfo(self.autocast or self.dtype).eps

        def nudge(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            drawn = torch.rand(output.shape, generator=self.generator, device="cpu") < 0.5
            return output * torch.where(drawn, 1 + step, 1 - step).to(output)

        with self.reference():
            before, gradients = self._alone()
            handle = self.embed.register_forward_hook(nudge)
            try:
                after, moved = self._alone()
            finally:
                handle.remove()
        return relative_rms(after, before), self._worst(moved, gradients)[0] or 0.0

    def _alone(self) -> tuple[Tensor, dict[str, Tensor]]:
        outputs, total = [], dict[str, Tensor]()
        start = 0
        for number, length in enumerate(self.lengths):
            output = self._run(self.documents.alone(number))
            weights = self._functional(output)[start : start + length]
            for name, gradient in self._gradients((output * weights).sum()).items():
                total[name] = total[name] + gradient if name in total else gradient
            outputs.append(output.detach())
            start += length
        return torch.cat(outputs), total

    def _refuse_no_numbers(self, alone: dict[str, Tensor]) -> None:
        """Refuse a model in which documents alone give NaN or Inf, since nothing can be compared
        with them.

        Raises:
            BlindMeasurement: an output or a gradient is not finite.
        """
        bad = [name for name, found in alone.items() if not _is_finite(found)]
        if not bad:
            return
        weights = [name for name, p in self.model.named_parameters() if not _is_finite(p)]
        where = f", and in {', '.join(weights[:3])}" if weights else ""
        raise BlindMeasurement(
            f"found NaN or Inf in {bad[0]} of documents alone{where}; wanted finite numbers, since "
            "no others can be compared; mend the weights, or measure in a dtype with a larger range"
        )

    def _packed(self) -> tuple[Tensor, dict[str, Tensor], float | None, float | None]:
        output, ranks = (
            self._run_packed(self.documents.packed()),
            Ranks(settings_of(self.model), sum(self.lengths)),
        )
        # without which every rank gets the whole row
        if not self.gradients:
            return output.detach(), {}, None, None
        gradients = self._gradients((output * ranks.own(self._functional(output))).sum())
        summed = ranks.summed(gradients, self._trained())
        return ranks.whole(output.detach()), summed, *self._cross_gradient(ranks)

    def _cross_gradient(self, ranks: Ranks) -> tuple[float, float | None]:
        """Return the largest gradient of any document's outputs with respect to another's
        embeddings, pixels and audio; and in a tree the largest one of the last sample's own outputs
        with respect to its prefix, else None.
        """
        inputs = self.documents.packed()
        features = {
            name: inputs[name].requires_grad_() for name in FEATURES.values() if name in inputs
        }
        with _as_leaf(self.embed) as embeds:
            output = self._run_packed(inputs | features)
        loss, number = (output * ranks.own(self._functional(output))).sum(-1), self.documents.number
        found: list[float] = []
        for half in self.halves:
            own = ranks.own(~half.to(self.device)[number])
            found += self._reached(loss[own].sum(), own, half, embeds, features)
        largest = ranks.largest(found, self.device)
        if not isinstance(self.documents, TreeDocuments):
            return largest, None
        branch, in_front = self.documents.branch(number == len(self.lengths) - 1)
        (gradient,) = torch.autograd.grad(loss[branch].sum(), embeds)
        return largest, _largest(gradient[0, in_front]) if bool(in_front.any()) else None

    def _reached(
        self,
        loss: Tensor,
        own: Tensor,
        half: Tensor,
        embeds: list[Tensor],
        features: dict[str, Tensor],
    ) -> Iterator[float]:
        """Yield the largest gradients of the loss of documents whose tokens are `own`, bool [T],
        with respect to the inputs of the others, which are `half`, bool [N].

        Rounding hides small leaks in values, but makes no gradient of zero.
        """
        # `embeds` let a rank without media take part in the ranks' collectives
        gradient, *media = torch.autograd.grad(
            loss, [*embeds, *features.values()], retain_graph=True, allow_unused=True
        )
        elsewhere = self.documents.elsewhere(own)
        # XLNet embeds [T, 1], CPM-Ant a prompt of its own in front of the row
        yield _largest(gradient.flatten(0, -2)[-len(elsewhere) :][elsewhere])
        for name, found in zip(features, media, strict=True):
            if found is not None:
                yield _largest(found[half.to(self.device)[self.documents.of_document(name)]])

    @torch.no_grad()
    def _first_alone(self) -> None:
        self._run(self.documents.alone(0))

    @torch.no_grad()
    def _influence(self, before: Tensor) -> float:
        """Return the influence of even documents on odd ones or of odd ones on even ones, whichever
        is larger.
        """
        worst = 0.0
        for changed in self.halves[:2]:
            after = self._run_packed(self.documents.packed(changed))
            kept = ~changed.to(self.device)[self.documents.number]
            found = relative_rms(after[kept], before[kept])
            worst = found if found != found else max(worst, found)
        return worst

    def _run_packed(self, inputs: dict[str, Any]) -> Tensor:
        return self.documents.of_documents(self._run(inputs))

    def _run(self, inputs: dict[str, Any]) -> Tensor:
        """Return [T, width]: logits, or hidden states where the model has no logits per token."""
        with nullcontext() if self.gradients else torch.no_grad():
            output = self.model(**inputs, use_cache=False)
        tokens: Tensor = output.logits if "logits" in output else output.last_hidden_state
        return tokens[0]

    def _functional(self, like: Tensor) -> Tensor:
        if self.weights is None:
            shape = (sum(self.lengths), like.shape[-1])
            drawn = torch.randn(shape, generator=self.generator, device="cpu")
            self.weights = drawn.to(like)
        return self.weights

    def _gradients(self, loss: Tensor) -> dict[str, Tensor]:
        trained = self._trained()
        if not trained:
            return {}
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        return {
            name: gradient
            for name, gradient in zip(trained, found, strict=True)
            if gradient is not None
        }

    def _trained(self) -> dict[str, Tensor]:
        return (
            {name: p for name, p in self.model.named_parameters() if p.requires_grad}
            if self.gradients
            else {}
        )

    def _worst(
        self, found: dict[str, Tensor], wanted: dict[str, Tensor]
    ) -> tuple[float | None, str | None]:
        """Return the largest relative error of a gradient, and the parameter's name.

        Some gradients are only rounding noise (queries of one-token documents): errors are relative
        to at least a hundredth of the median parameter's RMS.
        """
        if not wanted:
            return None, None
        sizes = {
            name: float(gradient.double().pow(2).mean().sqrt()) for name, gradient in wanted.items()
        }
        floor = 1e-2 * sorted(sizes.values())[len(sizes) // 2]
        errors = dict.fromkeys(found.keys() ^ wanted.keys(), float("inf"))
        for name in found.keys() & wanted.keys():
            difference = float((found[name].double() - wanted[name].double()).pow(2).mean().sqrt())
            errors[name] = difference / max(sizes[name], floor) if difference else 0.0
        name = max(
            errors, key=lambda key: float("inf") if errors[key] != errors[key] else errors[key]
        )
        return errors[name], name


def _halves(documents: int) -> list[Tensor]:
    """Return bool [N] each, on the host: even documents, odd ones and further halves, of which for
    every two documents one has the first and lacks the second: two numbers differ in a binary
    digit.
    """
    number, digits = torch.arange(documents, device="cpu"), (documents - 1).bit_length()
    return [number >> digit & 1 == value for digit in range(digits) for value in (0, 1)]


def _takes_positions(model: nn.Module) -> bool:
    """Whether the model of transformers in `model` takes `position_ids`; a patched model does even
    if its signature does not name them.
    """
    inner: Any = next(
        (part for part in model.modules() if isinstance(part, PreTrainedModel)), model
    )
    named = "position_ids" in signature(inner.forward).parameters
    return named or isinstance(inner, Replacement)


def _no_text(source: Any, config: Any) -> set[int]:
    """Return the ids that are no text: those of media, if there is a `source`, and the padding id,
    whose embedding is zeros: Gemma 3n takes a square root of it, whose gradient is infinite there.
    """
    media = set() if source is None else set(media_tokens(source.config).values())
    padding = getattr(config, "pad_token_id", None)
    return media if padding is None else {*media, padding}


def _is_finite(x: Tensor) -> bool:
    """Whether no number is NaN or Inf; quantised weights are not checked."""
    return not (x.is_floating_point() and x.element_size() > 1) or bool(x.isfinite().all())


def _largest(gradient: Tensor) -> float:
    return float(gradient.abs().max()) if gradient.numel() else 0.0


def _answers_per_token(model: nn.Module) -> bool:
    """Whether the model's output has one entry per token; models whose head pools a row are
    measured at the text model.
    """
    pooled = ("SequenceClassification", "QuestionAnswering")
    return not any(kind in type(module).__name__ for module in model.modules() for kind in pooled)


@contextmanager
def _as_leaf(embed: nn.Module) -> Iterator[list[Tensor]]:
    """Detach the outputs of an embedding for the block, so that they are leaves of the graph;
    yields the list of them.
    """
    leaves: list[Tensor] = []

    def cut(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        # a clone, because CTRL changes its embeddings in place, which a leaf does not allow
        return leaves[-1].clone()

    handle = embed.register_forward_hook(cut)
    try:
        yield leaves
    finally:
        handle.remove()
