"""The rows that `context_parallel.py` times: which model, which tokens, what is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.benchmarks.batches import Load
from tests.benchmarks.media import sixteen_documents
from tests.benchmarks.models import build, put_lora_on
from tests.benchmarks.shapes import SHAPES, Shape, fixed_lengths


@dataclass(frozen=True)
class Case:
    """One row of tokens.

    Attributes:
        name: of the workload, without the number of ranks.
        shape: the model.
        documents: "8k documents" or "one document".
        load: the row.
        checkpointing: whether layers are recomputed, on one GPU as on several.
        kind: "" (the whole model is trained), "lora" (adapters in fp32), "mtp" (a multi-token
            prediction head beside it) or "images" (a vision-language model).
    """

    name: str
    shape: Shape
    documents: str
    load: Load
    checkpointing: bool
    kind: str = ""

    @property
    def model(self) -> tuple[Shape, str]:
        """What `built` depends on."""
        return self.shape, self.kind

    def built(self, device: str) -> nn.Module:
        """Return the model, in bf16 on a GPU."""
        model = build(self.shape, device, torch.bfloat16 if device == "cuda" else torch.float32)
        if self.kind == "lora":
            put_lora_on(model, "fp32", dora=False)
        return model

    def facts(self) -> dict[str, Any]:
        """What a reader of the row has to know."""
        return {
            "documents": len(self.load.lengths),
            "tokens": sum(self.load.lengths),
            "layers": self.shape.layers,
            "recomputed": self.checkpointing,
            "note": self.shape.note(),
        }

    def step(self, model: Any, device: str) -> Callable[[], Tensor]:
        """Return the step that is timed."""
        inputs = self.load.inputs(model.config.get_text_config().vocab_size, device)
        labels, targets = inputs["input_ids"], self.load.real_tokens - len(self.load.lengths)

        def step() -> Tensor:
            model.zero_grad(set_to_none=True)
            loss: Tensor = model(
                **inputs, labels=labels, num_items_in_batch=targets, use_cache=False
            ).loss
            loss.backward()
            return loss.detach()

        return step


HOLDS_64K = 120 * 2**30
"""Bytes of a GPU that holds a step of 64k tokens of these models without recomputing layers."""


def small(device: str) -> bool:
    """Whether rows of 64k tokens have to be recomputed here, to fit one GPU."""
    return device == "cuda" and torch.cuda.get_device_properties(0).total_memory < HOLDS_64K


def cases(tiny: bool, small: bool = False) -> list[Case]:
    """Return the rows, the important ones first; on small GPUs layers of all are recomputed but
    where the row is about that.
    """
    return [
        replace(
            case, checkpointing=case.checkpointing or (small and "nothing" not in case.documents)
        )
        for case in _cases(tiny)
    ]


def _cases(tiny: bool) -> list[Case]:
    found = [
        *_packings("2b", "64k", tiny),
        *_packings("9b", "64k", tiny),
        *_packings("2b", "128k", tiny),
        *_packings("9b", "128k", tiny),
        *_packings("2b", "256k", tiny),
    ]
    documents = found[0]
    found[2:2] = [
        replace(documents, name="2b-64k-lora", kind="lora"),
        replace(documents, name="2b-64k-mtp", kind="mtp"),
        _images(tiny),
    ]
    # which one GPU does not hold
    within = next(case for case in found if case.name == "2b-128k")
    more = replace(within, documents="8k documents, nothing recomputed", checkpointing=False)
    return [*found, more, *_packings("9b", "256k", tiny)]


def _packings(shape: str, size: str, tiny: bool) -> list[Case]:
    """Return the case with many documents and that with one."""
    tokens = int(size[:-1]) * (8 if tiny else 1024)
    lengths = {"8k documents": 60 if tiny else 8000, "one document": tokens}
    return [
        Case(
            f"{shape}-{size}",
            SHAPES["tiny" if tiny else shape],
            documents,
            Load(tuple(fixed_lengths(tokens, length))),
            checkpointing=size != "64k",
        )
        for documents, length in lengths.items()
    ]


def _images(tiny: bool) -> Case:
    """Return the case of a vision-language model: 44,432 tokens, 116 images."""
    one, times = sixteen_documents("offsets", tiny), 1 if tiny else 4
    load = replace(one, lengths=one.lengths * times, images=one.images * times)
    shape = SHAPES["tiny-vl" if tiny else "2b-vl"]
    return Case("2b-vl-44k", shape, "documents with images", load, False, kind="images")
