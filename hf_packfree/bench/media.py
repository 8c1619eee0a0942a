"""The same batches with images: every document that is long enough has one, of about a fifth of its tokens."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_packfree.bench.documents import packed, padded
from hf_packfree.models.mrope import RowMedia, packed_positions
from hf_packfree.verify.documents import media_tokens

SHARE = 5
"""One token of so many stands for a part of an image."""


@dataclass(frozen=True, eq=False)
class Illustrated:
    """Documents, and their images.

    Attributes:
        ids: int64 [n] each.
        pixels: [patches, numbers of a patch], all images' in the documents' order.
        grids: int64 [images, 3].
    """

    ids: list[Tensor]
    pixels: Tensor
    grids: Tensor


def illustrated(documents: list[Tensor], source: Any, seed: int) -> Illustrated:
    """Put an image behind the first token of each document.

    Args:
        documents: random ids; those of media become text.
        source: the module that has `get_rope_index`.
        seed: of the pixels.
    """
    vision, tokens = source.config.vision_config, media_tokens(source.config)
    text = next(token for token in range(len(tokens) + 1) if token not in tokens.values())
    taken, side = torch.tensor(sorted(set(tokens.values()))), vision.spatial_merge_size
    ids, grids = [], []
    for document in documents:
        document = document.masked_fill(torch.isin(document, taken), text)
        height = int((len(document) / SHARE) ** 0.5)
        width = len(document) // SHARE // max(height, 1)
        if height and len(document) >= height * width + 3:
            document[1], document[2 : 2 + height * width] = tokens["image_start"], tokens["image"]
            grids.append((1, height * side, width * side))
        ids.append(document)
    sizes = torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)
    numbers = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(int(sizes.prod(1).sum()), numbers, generator=torch.Generator().manual_seed(seed))
    return Illustrated(ids, pixels, sizes)


def padded_media(given: Illustrated, source: Any, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Rows padded on the right, as a processor gives them; padding and images have no loss."""
    return _with_images(padded(given.ids, device), given, source, dtype)


def packed_media(
    given: Illustrated, source: Any, device: torch.device, dtype: torch.dtype, *, boundaries: bool = True
) -> dict[str, Any]:
    """One row, with `position_ids` of 4 rows, and with all boundary keywords or without."""
    row = packed(given.ids, device, boundaries=boundaries)
    lengths = torch.tensor([len(document) for document in given.ids])
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).int()
    media = RowMedia(image_grid_thw=given.grids)
    row["position_ids"] = packed_positions(source, torch.cat(given.ids)[None], cu_seqlens, media).to(device)
    return _with_images(row, given, source, dtype)


def _with_images(batch: dict[str, Any], given: Illustrated, source: Any, dtype: torch.dtype) -> dict[str, Any]:
    ids: Tensor = batch["input_ids"]
    images = ids == source.config.image_token_id
    batch["labels"] = batch["labels"].masked_fill(images, -100)
    if len(given.grids):
        batch |= {"pixel_values": given.pixels.to(ids.device, dtype), "image_grid_thw": given.grids.to(ids.device)}
    if "mm_token_type_ids" in inspect.signature(source.get_rope_index).parameters:
        batch["mm_token_type_ids"] = images.long()
    return batch
