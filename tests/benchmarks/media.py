"""Documents with images: what a vision-language model, or its tower alone, is called with.
Lengths in tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree.models.vision_attention import mark_packed
from tests.benchmarks.batches import Load
from tests.benchmarks.shapes import special_tokens

MERGE = 2
"""Patches along each side of what becomes one token."""
LENGTHS = (2048, 620, 510, 810, 342, 430, 700, 668, 1200, 380, 560, 450, 900, 330, 640, 520)
SIZES = ((24, 24), (32, 16), (28, 36), (16, 16))
"""Patches down and across."""


@dataclass(frozen=True)
class ImageLoad(Load):
    """One batch of documents with images.

    Attributes:
        lengths: of the documents, images counted as tokens.
        input_format: "padded", what the model's processor makes; "offsets", one row with
            cu_seq_lens and no positions; or "tower", the images alone.
        images: patches down and across of every document's images.
        patch: pixels along a patch.
    """

    images: tuple[tuple[tuple[int, int], ...], ...] = ()
    patch: int = 16

    def step(self, model: Any, device: str) -> Callable[[], Tensor]:
        """Return the step that is timed: of the model, or of its tower alone."""
        if self.input_format != "tower":
            return super().step(model, device)
        inputs = self.inputs(model.config.get_text_config().vocab_size, device)
        return _tower_step(
            model.base_model.visual, inputs["pixel_values"], mark_packed(inputs["image_grid_thw"])
        )

    def inputs(self, vocabulary: int, device: str) -> dict[str, Any]:
        """Return the model's keyword arguments, on the device."""
        grids = torch.tensor([(1, *size) for sizes in self.images for size in sizes])
        generator = torch.Generator().manual_seed(2)
        pixels = torch.randn(int(grids.prod(-1).sum()), 3 * 2 * self.patch**2, generator=generator)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        media = {"pixel_values": pixels.to(device, dtype), "image_grid_thw": grids.to(device)}
        documents = self._documents(vocabulary)
        tokens = _padded(documents) if self.input_format == "padded" else _row(documents)
        image = special_tokens(vocabulary)["image_token_id"]
        tokens["mm_token_type_ids"] = (tokens["input_ids"] == image).long()
        return media | {
            name: x.to(device) if isinstance(x, Tensor) else x for name, x in tokens.items()
        }

    def _documents(self, vocabulary: int) -> list[Tensor]:
        """Eight tokens before each image, one before its first and one behind its last, and text
        up to the length.
        """
        special, generator = special_tokens(vocabulary), torch.Generator().manual_seed(1)
        start, image, end = (
            special[f"{name}_token_id"] for name in ("vision_start", "image", "vision_end")
        )
        documents = []
        for length, sizes in zip(self.lengths, self.images, strict=True):
            parts: list[Tensor] = []
            for down, across in sizes:
                text = torch.randint(2, vocabulary - 8, (8,), generator=generator)
                parts += [text, torch.tensor([start, *[image] * (down * across // MERGE**2), end])]
            rest = length - sum(map(len, parts))
            documents.append(
                torch.cat([*parts, torch.randint(2, vocabulary - 8, (rest,), generator=generator)])
            )
        return documents

    def facts(self) -> dict[str, Any]:
        """Add the images to what a reader of the row has to know."""
        sizes = [size for document in self.images for size in document]
        return super().facts() | {
            "images": len(sizes),
            "patches": sum(down * across for down, across in sizes),
        }


def _tower_step(tower: nn.Module, pixels: Tensor, grids: Tensor) -> Callable[[], Tensor]:
    """The same step of the tower alone."""

    def step() -> Tensor:
        tower.zero_grad(set_to_none=True)
        loss: Tensor = tower(pixels, grid_thw=grids).pooler_output.float().pow(2).mean()
        loss.backward()
        return loss.detach()

    return step


def _padded(documents: list[Tensor]) -> dict[str, Any]:
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    lengths = torch.tensor([len(document) for document in documents])
    return {
        "input_ids": ids,
        "attention_mask": (torch.arange(ids.shape[1])[None] < lengths[:, None]).long(),
    }


def _row(documents: list[Tensor]) -> dict[str, Any]:
    lengths = torch.tensor([len(document) for document in documents])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())
    names = {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    return {"input_ids": torch.cat(documents)[None], **names}


def sixteen_documents(input_format: str, tiny: bool = False) -> ImageLoad:
    """11,108 tokens in 16 documents, 34% of the padded batch, with 29 images of 16,288 patches;
    `tiny`: 4 of a few tokens.
    """
    lengths = (60, 28, 30, 25) if tiny else LENGTHS
    sizes, room = (((4, 4), (4, 6)), 10) if tiny else (SIZES, 20)
    images = tuple(
        _that_fit(number, length, sizes, 1 if tiny else 400, room)
        for number, length in enumerate(lengths)
    )
    return ImageLoad(lengths, input_format, images, 4 if tiny else 16)


def _that_fit(
    number: int, length: int, sizes: tuple[tuple[int, int], ...], long: int, room: int
) -> tuple[tuple[int, int], ...]:
    """One image in short documents and two in long ones, of sizes in turn, as long as text is
    left.
    """
    found, used = [], 0
    for turn in range(1 if length < long else 2):
        down, across = sizes[(number + turn) % len(sizes)]
        if used + down * across // MERGE**2 + 2 > length - room:
            break
        used += 10 + down * across // MERGE**2
        found.append((down, across))
    return tuple(found)
