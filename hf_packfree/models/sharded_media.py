"""Media of a row that ranks share: each rank runs the towers on the items whose placeholders it
holds.

An item cut by the edge of a shard is computed on every rank that has some of it, and each takes its
own part of the features: the gradients of all parts add up to the item's.

Shapes: T tokens of the whole row, M items of one kind, F features of them, one per placeholder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_packfree.models.rope_index import RowMedia
from hf_packfree.packing import RowShard
from hf_packfree.packing.marks import KEPT
from hf_packfree.packing.media import Media

_FEATURES = {
    "image": ("pooler_output", "deepstack_features"),
    "video": ("pooler_output", "deepstack_features"),
    "audio": ("last_hidden_state", "pooler_output"),
}
"""Where the output of a method that makes features has those [F, D] that go to placeholders."""


def held_media(
    row: dict[str, Any], media: RowMedia, kinds: Iterable[Media], input_ids: Tensor, shard: RowShard
) -> tuple[dict[str, Any], dict[str, slice]]:
    """Return the media arguments of the items that a rank computes, None for kinds of which it has
    none, and which of their features it keeps.

    Args:
        row: arguments of a model, for all items.
        media: the items; kinds: the same as they are counted.
        input_ids: int64 [1, T] on the host, of the row before it was padded.
        shard: the rank's.

    Returns:
        {name: argument}, and {kind: which of the features of these items have their placeholders in
        the shard}.
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
    """Return which items have placeholders in a shard, and which of these items' features are
    theirs.
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
    name, grids = (
        f"{kind}_grid_thw",
        media.image_grid_thw if kind == "image" else media.video_grid_thw,
    )
    pixels = "pixel_values" if kind == "image" else "pixel_values_videos"
    if grids is None:
        return {}
    return {pixels: row[pixels][_part(grids.prod(-1), items)], name: row[name][items]}


def _audio(row: dict[str, Any], media: RowMedia, items: slice) -> dict[str, Any]:
    if media.audio_lengths is None:
        return {}
    given = {
        name: row[name]
        for name in ("feature_attention_mask", "audio_feature_lengths")
        if row.get(name) is not None
    }
    # otherwise [mel bins, frames of all]
    padded = "feature_attention_mask" in given
    audio = row["input_features"]
    own = audio[items] if padded else audio[:, _part(media.audio_lengths, items)]
    return {name: value[items] for name, value in given.items()} | {"input_features": own}


def _part(lengths: Tensor, items: slice) -> slice:
    """Return the slice that these items take of a concatenation of items of these lengths."""
    edges = F.pad(lengths.long().cumsum(0), (1, 0))
    return slice(int(edges[items.start]), int(edges[items.stop]))


@contextmanager
def reaching_media(embeddings: nn.Module, media: Iterable[Any]) -> Iterator[None]:
    """Add 0 times all media of the row that want gradients to its embeddings.

    Where only the towers are trained, a rank without media would otherwise have no gradient to
    reduce, and the others would wait for it.
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
    """Mark, on a view of pixels or audio features, which of their tower's features are kept."""
    return KEPT.on_view(given, features)


def take_mark(given: Any) -> slice | None:
    """Return what `mark_kept` has said, once: upstream's method for videos calls the one for
    images.
    """
    return KEPT.take(given) if isinstance(given, Tensor) else None


def keep_features(output: Any, kept: slice | None, kind: str) -> Any:
    """Return the output of `get_image_features`, `get_video_features` or `get_audio_features` with
    some features alone.

    Args:
        output: by name; changed in place.
        kept: which features; None for all.
        kind: "image", "video" or "audio".
    """
    if kept is None:
        return output
    for name in _FEATURES[kind]:
        found = output.get(name)
        if found is None:
            continue
        # of several layers
        deep = name == "deepstack_features"
        output[name] = (
            [_of_items(layer, kept) for layer in found] if deep else _of_items(found, kept)
        )
    return output


def _of_items(features: Any, kept: slice) -> Any:
    """Return [F, D], or a tuple of that where releases have one of each item."""
    return features[kept] if isinstance(features, Tensor) else (torch.cat(tuple(features))[kept],)
