"""What the trunk is called with, and the step that is timed.  Lengths in tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree.packing import PackedSequence


@dataclass(frozen=True)
class Load:
    """One batch by its documents.

    Attributes:
        lengths: of the documents.
        input_format: "collator" (restarting positions and every keyword a collator can give),
            "record" (the package's own record, built beforehand), "lengths" (the record, built of
            the lengths in each step), "plain" (input_ids alone) or "padded" (a rectangle with a 0/1
            mask).
        whole: whether the step has the head, its loss and a fused AdamW in it; else the trunk runs,
            without optimizer.
        autocast: whether the forward pass runs under bf16 autocast.
        also: lengths of further batches, with which steps take turns.
        counted: whether launches, the sum of kernels and the host's time are measured, too.
    """

    lengths: tuple[int, ...]
    input_format: str = "collator"
    whole: bool = field(default=False, kw_only=True)
    autocast: bool = field(default=False, kw_only=True)
    also: tuple[tuple[int, ...], ...] = field(default=(), kw_only=True)
    counted: bool = field(default=False, kw_only=True)

    @property
    def real_tokens(self) -> int:
        """Tokens that are not padding."""
        return sum(self.lengths)

    def step(self, model: Any, device: str) -> Callable[[], Tensor]:
        """Return the step that is timed; `model` is the whole model, of which the trunk runs, or
        all.
        """
        vocabulary = model.config.get_text_config().vocab_size
        batches = [
            _FORMATS[self.input_format](lengths, vocabulary, device)
            for lengths in (self.lengths, *self.also)
        ]
        step = whole_step_of if self.whole else step_of
        kind = torch.device(device).type
        autocast = partial(torch.autocast, kind, torch.bfloat16, enabled=self.autocast)
        return step(model if self.whole else model.base_model, batches, autocast)

    def inputs(self, vocabulary: int, device: str) -> dict[str, Any]:
        """Return the trunk's keyword arguments, on the device."""
        return _FORMATS[self.input_format](self.lengths, vocabulary, device)

    def facts(self) -> dict[str, Any]:
        """What a reader of the row has to know."""
        rows, width = (
            (len(self.lengths), max(self.lengths))
            if self.input_format == "padded"
            else (1, self.real_tokens)
        )
        return {
            "documents": len(self.lengths),
            "real_tokens": self.real_tokens,
            "longest": max(self.lengths),
            "tokens": rows * width,
            "input_format": self.input_format,
            **({"whole_step": True} if self.whole else {}),
            **({"autocast": "bf16"} if self.autocast else {}),
            **({"packings": 1 + len(self.also)} if self.also else {}),
        }


def random_tokens(shape: Sequence[int], vocabulary: int, device: str) -> Tensor:
    """int64 tokens of this shape."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, vocabulary - 1, tuple(shape), generator=generator).to(device)


def _collator(lengths: Sequence[int], vocabulary: int, device: str) -> dict[str, Any]:
    sizes = torch.tensor(lengths)
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(torch.int32).to(device)
    numbers = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), sizes)
    return {
        "input_ids": random_tokens((1, int(sizes.sum())), vocabulary, device),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None].to(device),
        "seq_idx": numbers[None].to(device),
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def _record(lengths: Sequence[int], vocabulary: int, device: str) -> dict[str, Any]:
    packed = PackedSequence.from_lengths(list(lengths), device=device)
    return {
        "input_ids": random_tokens((1, sum(lengths)), vocabulary, device),
        "packed_sequence": packed,
    }


def _lengths(lengths: Sequence[int], vocabulary: int, device: str) -> dict[str, Any]:
    return {
        "input_ids": random_tokens((1, sum(lengths)), vocabulary, device),
        "packed_sequence": partial(PackedSequence.from_lengths, list(lengths), device=device),
    }


def _called(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a step's keyword arguments, with what the step builds itself."""
    return {name: value() if callable(value) else value for name, value in inputs.items()}


def _plain(lengths: Sequence[int], vocabulary: int, device: str) -> dict[str, Any]:
    assert len(lengths) == 1
    return {"input_ids": random_tokens((1, lengths[0]), vocabulary, device)}


def _padded(lengths: Sequence[int], vocabulary: int, device: str) -> dict[str, Any]:
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    tokens = random_tokens(mask.shape, vocabulary, "cpu") * mask
    return {"input_ids": tokens.to(device), "attention_mask": mask.long().to(device)}


_FORMATS: dict[str, Callable[..., dict[str, Any]]] = {
    "collator": _collator,
    "record": _record,
    "lengths": _lengths,
    "plain": _plain,
    "padded": _padded,
}


def step_of(
    trunk: nn.Module, batches: Sequence[dict[str, Any]], autocast: Callable[[], Any] = nullcontext
) -> Callable[[], Tensor]:
    """Return one training step without its optimizer: gradients dropped, forward, mean square of
    the output, backward.
    """
    turns = cycle(batches)

    def step() -> Tensor:
        inputs = _called(next(turns))
        trunk.zero_grad(set_to_none=True)
        with autocast():
            loss = trunk(use_cache=False, **inputs).last_hidden_state.float().pow(2).mean()
        loss.backward()
        return loss.detach()

    return step


def whole_step_of(
    model: nn.Module, batches: Sequence[dict[str, Any]], autocast: Callable[[], Any] = nullcontext
) -> Callable[[], Tensor]:
    """Return one training step: gradients dropped, forward with the language model's loss,
    backward, fused AdamW of what is trained.

    Every token that is not padding has a label; what a document's last token would predict is
    masked by who knows documents.
    """
    turns = cycle([{**inputs, "labels": _labels(inputs)} for inputs in batches])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with autocast():
            loss: Tensor = model(use_cache=False, **_called(next(turns))).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _labels(inputs: dict[str, Any]) -> Tensor:
    labels: Tensor = inputs["input_ids"].clone()
    if "attention_mask" in inputs:
        labels = labels.masked_fill(inputs["attention_mask"] == 0, -100)
    return labels
