"""Assigns images, videos and audio to the documents of a row, by counting placeholders on the host.

Upstream puts the features of the whole batch at placeholders in reading order, and does not check
which document they belong to. Shapes: T tokens of the row, N segments, M media items of one kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_packfree.errors import BoundaryError


@dataclass(frozen=True, eq=False, kw_only=True)
class Media:
    """The media items of one kind in a row, in reading order.

    Attributes:
        name: "image", "video" or "audio", for messages.
        token: the id of its placeholders.
        sizes: int64 [M] on the host, the placeholders of each item, at least 1 each.
        runs: int64 [M] on the host, the number of runs of equal length that an item's placeholders
            form: one per frame for videos with text between their frames, else 1; None where
            placeholders of another kind may stand in between.
    """

    name: str
    token: int
    sizes: Tensor
    runs: Tensor | None = None

    def run_sizes(self) -> Tensor:
        """Return int64 on the host: the placeholders of each run, or of each item where runs are
        not known.
        """
        if self.runs is None:
            return self.sizes
        # torch's repeat_interleave wakes all of the host's threads, which takes milliseconds on
        # large hosts
        return torch.from_numpy(np.repeat((self.sizes // self.runs).numpy(), self.runs.numpy()))


def media_offsets(input_ids: Tensor, cu_seqlens: Tensor, media: Media) -> Tensor:
    """Return int64 [N+1] on the host: the items of document d are those from `offsets[d]` up to
    `offsets[d + 1]`.

    Args:
        input_ids: integers [T] on the host.
        cu_seqlens: int32 [N+1] on the host, offsets of the documents.
        media: all items of one kind.

    Raises:
        BoundaryError: a document's placeholders are not those of whole items, a document starts
            inside an item, or items are left over; the message names the document and the item,
            counted from 0.

    Examples:
        Two documents, 9 being the placeholder, with images of two and of one token:

        >>> import torch
        >>> from hf_packfree.packing.media import Media, media_offsets
        >>> sizes, runs = torch.tensor([2, 1]), torch.tensor([1, 1])
        >>> images = Media(name="image", token=9, sizes=sizes, runs=runs)
        >>> cu_seqlens = torch.tensor([0, 4, 6], dtype=torch.int32)
        >>> media_offsets(torch.tensor([5, 9, 9, 6, 5, 9]), cu_seqlens, images)
        tensor([0, 1, 2])
    """
    place = input_ids == media.token
    counted = F.pad(place.cumsum(0), (1, 0))
    offsets = cu_seqlens.long()
    ends, until = F.pad(media.sizes.cumsum(0), (1, 0)), counted[offsets]
    items = torch.searchsorted(ends, until)
    wrong = (ends[items.clamp(max=len(media.sizes))] != until).nonzero()[:, 0]
    if wrong.numel():
        raise _wrong_count(media, int(wrong[0]) - 1, offsets, place, items)
    if int(items[-1]) < len(media.sizes):
        raise BoundaryError(
            f"found {len(media.sizes)} {media.name}s and placeholders of {int(items[-1])}: "
            f"{media.name} {int(items[-1])} belongs to no document; wanted the features of what is "
            "in the row alone; pass the media of these documents, in their order"
        )
    _check_runs(media, offsets, place, counted)
    return items


def _wrong_count(
    media: Media, document: int, offsets: Tensor, place: Tensor, items: Tensor
) -> BoundaryError:
    start, end = int(offsets[document]), int(offsets[document + 1])
    item, of = (
        max(int(items[document + 1]) - 1, 0),
        f"document {document} (tokens {start} to {end - 1})",
    )
    if end < len(place) and bool(place[end - 1] & place[end]):
        return BoundaryError(
            f"found a document boundary at token {end}, inside {media.name} {item}; wanted "
            "boundaries between media alone; build the boundaries from the lengths of whole "
            "documents, and never truncate a document inside its media"
        )
    found, first = int(place[start:end].sum()), int(items[document])
    given = media.sizes[first : item + 1].tolist()
    return BoundaryError(
        f"found {found} {media.name} placeholders in {of}, where {media.name} {first} is the "
        f"first; wanted those of whole {media.name}s, which have {given} from there on; pass the "
        "media in the documents' order, each with its own size"
    )


def _check_runs(media: Media, offsets: Tensor, place: Tensor, counted: Tensor) -> None:
    """Refuse runs of placeholders that end inside an item: two items in wrong order have the
    right sum.
    """
    if media.runs is None or not len(media.sizes):
        return
    ends = media.run_sizes().cumsum(0)
    last = place & F.pad(~place[1:], (0, 1), value=True)
    last[offsets[1:] - 1] = place[offsets[1:] - 1]
    found = last.nonzero()[:, 0]
    inside = found[~torch.isin(counted[found + 1], ends)]
    if inside.numel():
        token = int(inside[0])
        document = int(torch.searchsorted(offsets, token, right=True)) - 1
        item = int(torch.searchsorted(media.sizes.cumsum(0), counted[token + 1]))
        raise BoundaryError(
            f"found a run of {media.name} placeholders in document {document} that ends at token "
            f"{token}, inside {media.name} {item} of {int(media.sizes[item])} tokens; wanted runs "
            f"as long as their {media.name}s; pass the media in the documents' order, each with "
            "its own size"
        )
