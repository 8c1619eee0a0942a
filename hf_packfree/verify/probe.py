"""One model on one packed row: outputs, gradients and influence against the same documents
alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from hf_packfree.errors import BlindMeasurement
from hf_packfree.models.base import Replacement
from hf_packfree.models.linear_weights import autocast_dtype
from hf_packfree.models.media_keywords import FEATURES
from hf_packfree.models.slow_decay import slow_decays
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
        """Return the largest gradient of the last document's outputs with respect to others'
        embeddings, or of any document's with respect to a neighbour's pixels and audio; and in a
        tree the largest one with respect to the prefix of the last sample, else None.
        """
        inputs = self.documents.packed()
        features = {
            name: inputs[name].requires_grad_() for name in FEATURES.values() if name in inputs
        }
        with _as_leaf(self.embed) as embeds:
            output = self._run_packed(inputs | features)
        loss = (output * ranks.own(self._functional(output))).sum(-1)
        number = ranks.own(self.documents.number, fill=-1)
        last = number == len(self.lengths) - 1
        (gradient,) = torch.autograd.grad(loss[last].sum(), embeds, retain_graph=True)
        elsewhere = self.documents.elsewhere(last)
        # XLNet embeds [T, 1], CPM-Ant a prompt of its own in front of the row
        others = _largest(gradient.flatten(0, -2)[-len(elsewhere) :][elsewhere])
        found = [others, *self._to_features(loss, number, embeds, features)]
        largest = ranks.largest(found, self.device)
        if not isinstance(self.documents, TreeDocuments):
            return largest, None
        branch, in_front = self.documents.branch(last)
        (gradient,) = torch.autograd.grad(loss[branch].sum(), embeds)
        return largest, _largest(gradient[0, in_front]) if bool(in_front.any()) else None

    def _to_features(
        self, loss: Tensor, number: Tensor, embeds: list[Tensor], features: dict[str, Tensor]
    ) -> Iterator[float]:
        """Yield the largest gradients of even documents' losses [T] with respect to odd documents'
        media, and the other way round.

        `embeds` let a rank without media take part in the ranks' collectives.
        """
        for name, values in features.items():
            owner = self.documents.of_document(name)
            for parity in (0, 1):
                own = loss[number % 2 == parity].sum()
                *_, gradient = torch.autograd.grad(
                    own, [*embeds, values], retain_graph=True, allow_unused=True
                )
                yield 0.0 if gradient is None else _largest(gradient[owner % 2 != parity])

    @torch.no_grad()
    def _first_alone(self) -> None:
        self._run(self.documents.alone(0))

    @torch.no_grad()
    def _influence(self, before: Tensor) -> float:
        """Return the influence of even documents on odd ones; with media, whose towers may look
        ahead, also of odd ones on even ones, and the larger of both.
        """
        worst = 0.0
        for parity in (0, 1) if self.documents.media else (0,):
            changed = torch.arange(len(self.lengths), device="cpu") % 2 == parity
            after = self._run_packed(self.documents.packed(changed))
            kept = self.documents.number % 2 != parity
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


@contextmanager
def packages_called() -> Iterator[set[str]]:
    """Collect, for the block, the top-level packages whose Python functions are called in this
    thread.
    """
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            found.add(str(frame.f_globals.get("__name__")).partition(".")[0])

    before: Any = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        if before is None or callable(before):
            sys.setprofile(before)
        else:
            # cProfile's before Python 3.12, which is set by itself alone
            sys.setprofile(None)
            before.enable()


@contextmanager
def prepared(model: nn.Module, slow_decay: bool) -> Iterator[None]:
    """Set evaluation mode and slow decay for the block, and restore both afterwards."""
    modes = {module: module.training for module in model.modules()}
    slow = slow_decays(model) if slow_decay else {}
    decays = {parameter: parameter.detach().clone() for parameter in slow}
    model.eval()
    try:
        with torch.no_grad():
            for parameter, decay in slow.items():
                parameter.copy_(_sharded_as(parameter, decay))
        yield
    finally:
        with torch.no_grad():
            for parameter, before in decays.items():
                parameter.copy_(before)
        for module, training in modes.items():
            module.training = training


def _sharded_as(parameter: Tensor, x: Tensor) -> Tensor:
    """Return x as ranks hold the parameter, on every one of which this is called."""
    if not isinstance(parameter, DTensor):
        return x
    x = x.to(parameter.device, parameter.dtype)
    return distribute_tensor(x, parameter.device_mesh, parameter.placements)
