"""The documents of a batch: their lengths, from a distribution or the user's file, and the batch
padded and packed.

With images, every document that is long enough has one, of about a fifth of its tokens.
"""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening

from hf_packfree.errors import UnsupportedInput
from hf_packfree.models.media_checks import values_of_a_patch
from hf_packfree.models.rope_index import RowMedia, packed_positions
from hf_packfree.verify.random_documents import media_tokens

DISTRIBUTIONS: dict[str, str] = {
    "instructions": "log-normal: eight documents fill a padded batch to 34%",
    "uniform": "every length alike: eight documents fill a padded batch to 56%",
    "equal": "all documents of one length: no padding at all",
}
LONGEST = 512
"""Tokens of a distribution's longest document if no number is given."""
SHARE = 5
"""One of this many tokens is an image placeholder."""


@dataclass(frozen=True)
class Sample:
    """The documents of one batch.

    Attributes:
        lengths: tokens of each document.
        origin: where the lengths come from and how they were chosen or cut, in words.
        cut: how many documents of a file were truncated to the longest wanted.
    """

    lengths: tuple[int, ...]
    origin: str
    cut: int = 0


def choose_lengths(source: str, documents: int, longest: int | None = None) -> Sample:
    """Choose the lengths, in tokens, of one batch.

    Args:
        source: a name of `DISTRIBUTIONS`, or a JSONL file whose lines are numbers, or objects with
            "length" or "input_ids".
        documents: how many lengths; they are evenly spaced quantiles, so that one batch represents
            the distribution. A file's longest document need not be among them, and a file of fewer
            lines gives some lengths more than once.
        longest: tokens of the longest document of a distribution, 512 if not given. A file's
            documents are cut to it if it is given, otherwise not at all.

    Raises:
        UnsupportedInput: `source` is neither a name nor a file of lengths.
    """
    if source in DISTRIBUTIONS and not Path(source).is_file():
        longest = longest or LONGEST
        lengths = tuple(max(1, round(share * longest)) for share in _shares(source, documents))
        return Sample(
            lengths, f"the distribution {source!r}, with {longest:,} tokens in the longest document"
        )
    return _quantiles(source, documents, longest)


def _quantiles(source: str, documents: int, longest: int | None) -> Sample:
    found = sorted(_read(Path(source)))
    places = (int((place + 0.5) / documents * len(found)) for place in range(documents))
    lengths = tuple(found[place] for place in places)
    whole = f"documents: {len(found):,}; tokens: {found[0]:,} to {found[-1]:,}"
    origin = f"{documents} evenly spaced quantiles of {source!r} ({whole})"
    if documents > len(found):
        origin += ", some more than once, because it has fewer documents"
    if longest is None:
        return Sample(lengths, f"{origin}; none is cut")
    cut = sum(length > longest for length in lengths)
    origin += f"; longer than {longest:,} tokens and cut to that: {cut} of {documents}"
    return Sample(tuple(min(length, longest) for length in lengths), origin, cut)


def _shares(name: str, documents: int) -> list[float]:
    quantiles = [(place + 0.5) / documents for place in range(documents)]
    if name == "equal":
        return [1.0] * documents
    if name == "uniform":
        return [(place + 1) / documents for place in range(documents)]
    normal = NormalDist()
    top = normal.inv_cdf(quantiles[-1])
    return [math.exp(0.95 * (normal.inv_cdf(quantile) - top)) for quantile in quantiles]


def _read(path: Path) -> list[int]:
    if not path.is_file():
        raise UnsupportedInput(
            f"found no file and no distribution {str(path)!r}; wanted {', '.join(DISTRIBUTIONS)}, "
            "or a JSONL file of lengths; check the name"
        )
    try:
        # not splitlines: text inside JSON may hold U+2028 and others, at which it breaks, too
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UnsupportedInput(
            f"found {path}, which is no text in UTF-8 ({error}); wanted a JSONL file of lengths; "
            "save it as UTF-8"
        ) from error
    lengths = [_length(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not lengths:
        raise UnsupportedInput(
            f"found {path} without a line; wanted a length per line; write one for each document"
        )
    return lengths


def _length(line: str, path: Path, number: int) -> int:
    found: Any
    try:
        found = json.loads(line)
        if isinstance(found, dict):
            ids = found.get("input_ids")
            found = found.get("length", len(ids) if isinstance(ids, list) else None)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise UnsupportedInput(
            f"found line {number} of {path}: {line[:40]!r}; wanted a number of at least 1, or an "
            "object with 'length' or 'input_ids'; write one document per line"
        )
    return found


def documents_of(lengths: tuple[int, ...], vocabulary: int, seed: int) -> list[Tensor]:
    """Random documents, int64 [n] each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (length,), generator=generator) for length in lengths]


def padded(documents: list[Tensor], device: torch.device) -> dict[str, Any]:
    """Rows padded on the right to the longest; padding has no loss."""
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence(
        [torch.ones_like(document) for document in documents], batch_first=True
    )
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return {name: value.to(device) for name, value in batch.items()}


def packed(
    documents: list[Tensor], device: torch.device, *, boundaries: bool = True
) -> dict[str, Any]:
    """One row by transformers' flattening collator, with all its boundary keywords or with
    `position_ids` alone.
    """
    collator: Any = DataCollatorWithFlattening
    collate = collator(return_flash_attn_kwargs=boundaries, return_seq_idx=boundaries)
    batch = collate([{"input_ids": document.tolist()} for document in documents])
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


@dataclass(frozen=True, eq=False)
class Illustrated:
    """Documents, and their images.

    Attributes:
        ids: int64 [n] each.
        pixels: [patches, numbers of a patch], of all images in the order of the documents.
        grids: int64 [images, 3], `image_grid_thw`.
    """

    ids: list[Tensor]
    pixels: Tensor
    grids: Tensor


def illustrated(documents: list[Tensor], source: Any, seed: int) -> Illustrated:
    """Insert an image after the first token of each document.

    Args:
        documents: random ids; ids of media among them are replaced by text.
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
    shape = int(sizes.prod(1).sum()), values_of_a_patch(vision)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return Illustrated(ids, pixels, sizes)


def padded_media(
    given: Illustrated, source: Any, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """The arguments of a forward of rows padded on the right, like a processor's; padding and
    images have no loss.
    """
    return _with_images(padded(given.ids, device), given, source, dtype)


def packed_media(
    given: Illustrated,
    source: Any,
    device: torch.device,
    dtype: torch.dtype,
    *,
    boundaries: bool = True,
) -> dict[str, Any]:
    """The arguments of a forward of one row, with `position_ids` of 4 rows; with all boundary
    keywords or with none.
    """
    row = packed(given.ids, device, boundaries=boundaries)
    lengths = torch.tensor([len(document) for document in given.ids])
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).int()
    media = RowMedia(image_grid_thw=given.grids)
    row["position_ids"] = packed_positions(
        source, torch.cat(given.ids)[None], cu_seqlens, media
    ).to(device)
    return _with_images(row, given, source, dtype)


def _with_images(
    batch: dict[str, Any], given: Illustrated, source: Any, dtype: torch.dtype
) -> dict[str, Any]:
    ids: Tensor = batch["input_ids"]
    images = ids == source.config.image_token_id
    batch["labels"] = batch["labels"].masked_fill(images, -100)
    if len(given.grids):
        batch |= {
            "pixel_values": given.pixels.to(ids.device, dtype),
            "image_grid_thw": given.grids.to(ids.device),
        }
    if "mm_token_type_ids" in inspect.signature(source.get_rope_index).parameters:
        batch["mm_token_type_ids"] = images.long()
    return batch
