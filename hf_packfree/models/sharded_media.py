"""Media of a row that ranks share: each rank runs the towers on the items with placeholders in its
shard.

An item cut by the edge of a shard is computed on every rank with some of its placeholders, and each
rank keeps the features of its own placeholders: the gradients of the ranks add up to the item's
gradient.

Shapes: T tokens of the whole row, M items of one kind, F features of them, one per placeholder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_packfree.models.media_keywords import AUDIO_SIZES, FEATURES, SIZES
from hf_packfree.models.rope_index import RowMedia
from hf_packfree.packing import RowShard
from hf_packfree.packing.marks import KEPT
from hf_packfree.packing.media import Media

_FEATURES = {
    "image": ("pooler_output", "deepstack_features"),
    "video": ("pooler_output", "deepstack_features"),
    "audio": ("last_hidden_state", "pooler_output"),
}
"""{kind of media: fields of the output of `get_*_features` that hold the features [F, D] of
placeholders}.
"""


def held_media(
    row: dict[str, Any], media: RowMedia, kinds: Iterable[Media], input_ids: Tensor, shard: RowShard
) -> tuple[dict[str, Any], dict[str, slice]]:
    """Return the arguments of media for the items that a rank computes, None for kinds without such
    items, and which features of these items the rank keeps.

    Args:
        row: a model's arguments, for all items.
        media: the sizes of all items.
        kinds: the items by kind, as placeholders are counted.
        input_ids: int64 [1, T] on the host, the row before padding to a multiple of W.
        shard: the rank's shard.

    Returns:
        {name: argument}, and {kind: which features of these items have their placeholders in the
        shard}.
    """
    arguments: dict[str, Any] = {}
    features: dict[str, slice] = {}
    for kind in kinds:
        items, kept = _held(kind, input_ids, shard)
        if kept.stop:
            features[kind.name] = kept
        parts = (
            _audio(row, media, items)
            if kind.name == "audio"
            else _pixels(row, media, items, kind.name)
        )
        arguments |= {name: part if kept.stop else None for name, part in parts.items()}
    return arguments, features


def _held(kind: Media, input_ids: Tensor, shard: RowShard) -> tuple[slice, slice]:
    """Return which items have placeholders in a shard, and which of these items' features belong to
    placeholders in the shard.
    """
    places, ends = (input_ids[0] == kind.token).nonzero()[:, 0], kind.sizes.cumsum(0)
    edges = torch.tensor([shard.rank, shard.rank + 1], device="cpu") * shard.tokens
    first, end = torch.searchsorted(places, edges).tolist()
    if first == end:
        return slice(0, 0), slice(0, 0)
    items = torch.searchsorted(
        ends, torch.tensor([first, end - 1], device="cpu"), right=True
    ).tolist()
    before = int(ends[items[0]] - kind.sizes[items[0]])
    return slice(items[0], items[1] + 1), slice(first - before, end - before)


def _pixels(row: dict[str, Any], media: RowMedia, items: slice, kind: str) -> dict[str, Any]:
    pixels, name = FEATURES[kind], SIZES[kind]
    grids = getattr(media, name)
    if grids is None:
        return {}
    return {pixels: row[pixels][_part(grids.prod(-1), items)], name: row[name][items]}


def _audio(row: dict[str, Any], media: RowMedia, items: slice) -> dict[str, Any]:
    if media.audio_lengths is None:
        return {}
    given = {name: row[name] for name in AUDIO_SIZES if row.get(name) is not None}
    # without the mask, features are [mel bins, frames of all audios]
    padded = "feature_attention_mask" in given
    audio = row["input_features"]
    own = audio[items] if padded else audio[:, _part(media.audio_lengths, items)]
    return {name: value[items] for name, value in given.items()} | {"input_features": own}


def _part(lengths: Tensor, items: slice) -> slice:
    """Return the slice of `items` in a concatenation of items of these lengths."""
    edges = F.pad(lengths.long().cumsum(0), (1, 0))
    return slice(int(edges[items.start]), int(edges[items.stop]))


@contextmanager
def reaching_media(embeddings: nn.Module, media: Iterable[Any]) -> Iterator[None]:
    """Within the block, add 0 times all media of the row that require gradients to the output of
    `embeddings`.

    Otherwise, if only the towers are trained, a rank without media would have no gradients to
    reduce, and the other ranks would wait for them.
    """
    wanted = [x for x in media if isinstance(x, Tensor) and x.requires_grad]
    if not wanted:
        yield
        return

    def add_nothing(module: nn.Module, given: Any, output: Tensor) -> Tensor:
        return output + torch.stack([x.flatten()[:0].sum().to(output) for x in wanted]).sum()

    handle = embeddings.register_forward_hook(add_nothing)
    try:
        yield
    finally:
        handle.remove()


def mark_kept(given: Tensor, features: slice) -> Tensor:
    """Return a view of pixels or audio features with a mark: which of the features that the tower
    returns are kept.
    """
    return KEPT.on_view(given, features)


def take_mark(given: Any) -> slice | None:
    """Return the slice of `mark_kept` and remove the mark, because upstream's method for videos
    calls the method for images with the same pixels.
    """
    return KEPT.take(given) if isinstance(given, Tensor) else None


def keep_features(output: Any, kept: slice | None, kind: str) -> Any:
    """Return the output of `get_image_features`, `get_video_features` or `get_audio_features` with
    the kept features only.

    Args:
        output: a `ModelOutput`, changed in place.
        kept: which features; None for all.
        kind: "image", "video" or "audio".
    """
    if kept is None:
        return output
    for name in _FEATURES[kind]:
        found = output.get(name)
        if found is None:
            continue
        # a list with the features of several layers
        deep = name == "deepstack_features"
        output[name] = (
            [_of_items(layer, kept) for layer in found] if deep else _of_items(found, kept)
        )
    return output


def _of_items(features: Any, kept: slice) -> Any:
    """Return the kept features [F, D]; in a tuple of one in releases with a tuple of the features
    of each item.
    """
    return features[kept] if isinstance(features, Tensor) else (torch.cat(tuple(features))[kept],)
