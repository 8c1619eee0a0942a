"""Patched vision-language models: boundaries are read before the towers run, and positions are
computed for each document.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_packfree.errors import BoundaryError, UnsupportedInput
from hf_packfree.models.absent_media import run_with_absent_media
from hf_packfree.models.base import Replacement
from hf_packfree.models.call import Call
from hf_packfree.models.compat import cache_of
from hf_packfree.models.entry import enter
from hf_packfree.models.media_checks import check_media_sizes, check_media_tensors, check_widths
from hf_packfree.models.media_keywords import FEATURES, PIXELS, SECONDS, SIZES
from hf_packfree.models.placeholders import PlaceholderMask
from hf_packfree.models.rope_index import (
    RowMedia,
    items_of_documents,
    media_of,
    numbered_by_upstream,
    packed_positions,
)
from hf_packfree.models.row import as_requested, restore_layers, row_of_each, row_positions
from hf_packfree.models.sharded_media import held_media, keep_features, mark_kept, take_mark
from hf_packfree.models.vision_attention import PackedVisionTower, mark_packed
from hf_packfree.packing import PackedSequence, repad, shard_of, uncompiled
from hf_packfree.packing.marks import COUNTED, CountedMedia
from hf_packfree.packing.mrope_rows import is_text
from hf_packfree.packing.opaque import replaced
from hf_packfree.packing.pinned import to_device


class PackedVisionLanguage(Replacement):
    """Put in front of a family's vision-language model."""

    endings = ("Model",)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if PackedVisionLanguage in cls.__bases__:
            keep_record_from_towers(cls)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run upstream's forward; if the batch is packed, on the row [1, T] and with the record.

        `rope_deltas`, which generation reads, are not changed.

        Raises:
            BoundaryError: media and the placeholders of the documents do not agree.
            UnsupportedInput: positions of media are missing and cannot be computed, or
                `position_ids` count placeholders like text.
        """
        arguments = self.by_name(args, kwargs)
        if (
            arguments is None
            or arguments.get("input_ids") is None
            and arguments.get("inputs_embeds") is None
        ):
            # upstream raises its own error
            return super().forward(*args, **kwargs)
        call = enter(Call(self.language_model, arguments))
        if call.packed is None:
            given = upstreams_arguments(self, call.arguments)
            return run_with_absent_media(self, super().forward, given)
        packed = call.packed.for_shape(call.batch.shape)
        # the text model passes the batch's record to followers, which read the caller's labels
        row = packed_arguments(self, packed, call.arguments) | {"packed_sequence": call.packed}
        output = run_with_absent_media(self, super().forward, row)
        output.last_hidden_state = repad(output.last_hidden_state, packed)
        restore_layers(output, packed)
        return as_requested(output, call, self.config)

    def get_placeholder_mask(
        self, input_ids: Any, inputs_embeds: Any, *args: Any, **features: Any
    ) -> Any:
        """Return upstream's masks of placeholders. Upstream counts the placeholders on the device,
        and the host waits; if they were counted on the host before, the count is skipped.
        """
        upstream: Any = super()
        counted, width = COUNTED.of(input_ids), inputs_embeds.shape[-1]
        if counted is not None:
            features = {
                name: x
                for name, x in features.items()
                if x.shape != (counted.features.get(name), width)
            }
        masks = upstream.get_placeholder_mask(input_ids, inputs_embeds, *args, **features)
        if counted is None or torch.compiler.is_compiling():
            return masks
        return tuple(mask.as_subclass(PlaceholderMask) for mask in masks)

    def compute_3d_position_ids(self, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Return upstream's positions, or those of a packed row, which the host computes while the
        device runs the towers.
        """
        upstream: Any = super()
        counted = COUNTED.of(input_ids)
        return (
            upstream.compute_3d_position_ids(input_ids, *args, **kwargs)
            if counted is None
            else counted.positions()
        )


def keep_record_from_towers(cls: Any) -> None:
    """Wrap the methods `get_*_features` of a class, so that towers do not get the record of the
    text.
    """
    for kind in FEATURES:
        if hasattr(cls, name := f"get_{kind}_features"):
            setattr(cls, name, _without_the_record(cls, name, kind))


def _without_the_record(cls: Any, name: str, kind: str) -> Any:
    """Return upstream's method `name`, which drops the keyword `packed_sequence`; its signature is
    upstream's, since generation reads the signature.

    For a shard, the method returns only the features whose placeholders are in the shard.
    """

    @functools.wraps(getattr(cls, name))
    def features(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("packed_sequence", None)
        kept = take_mark(args[0] if args else kwargs.get(FEATURES[kind]))
        return keep_features(getattr(super(cls, self), name)(*args, **kwargs), kept, kind)

    return features


def upstreams_arguments(source: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a batch that upstream runs as it came, without empty media and with
    what upstream numbers the others by; see `packed_arguments`.
    """
    given = given | _without_items(given)
    return given if cache_of(given) is not None else numbered_by_upstream(source, given)


def packed_arguments(source: Any, packed: PackedSequence, given: dict[str, Any]) -> dict[str, Any]:
    """Return upstream's arguments for the row [1, T]; media are unchanged, in the order of their
    placeholders.

    Args:
        source: the module that has `get_rope_index`.
        packed: the record, for the shape of `given`.
        given: the arguments [B, S, ...] of the forward, by name.

    Raises:
        BoundaryError, UnsupportedInput: see `PackedVisionLanguage.forward`.
    """
    # the media of a shard were checked before the row was cut
    if not packed.is_shard:
        check_media_tensors(given, packed.batch_shape)
    given = given | _without_items(given)
    row = row_of_each(given, packed)
    row |= {
        "attention_mask": None,
        "use_cache": False,
        "packed_sequence": packed,
        "return_dict": True,
        **_numbered(source, packed, given.get("position_ids"), row),
    }
    # `cache_position` counts tokens of the batch, not of the row
    row.pop("cache_position", None)
    return row


def _without_items(given: dict[str, Any]) -> dict[str, None]:
    """Return {keyword: None} for kinds of media with empty tensors, as collators make for batches
    without such items: towers fail on empty tensors.
    """
    empty = [
        kind
        for kind, sizes in SIZES.items()
        if isinstance(given.get(sizes), Tensor) and len(given[sizes]) == 0
    ]
    return dict.fromkeys([name for kind in empty for name in (SIZES[kind], FEATURES[kind])])


@uncompiled
def _numbered(
    source: Any, packed: PackedSequence, given: Tensor | None, row: dict[str, Any]
) -> dict[str, Any]:
    """Return the row's `position_ids`, [1, T], or [3 or 4, 1, T] with mRoPE, and its marked ids and
    grids.

    `position_ids` are None if `compute_3d_position_ids` computes the positions during the forward.
    """
    if packed.is_shard:
        return _of_shard(source, packed, given, row)
    media, ids, positions = read_media(source, packed, given, row)
    found = _marked_grids(source, media, row)
    if ids is not None and isinstance(source, PackedVisionLanguage):
        features = {kind.name: int(kind.sizes.sum()) for kind in media_of(source, media)}
        return found | {
            "position_ids": None,
            "input_ids": _counted(row["input_ids"], features, positions),
        }
    return found | {"position_ids": positions()}


def _of_shard(
    source: Any, packed: PackedSequence, given: Tensor | None, row: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments that `_numbered` returns, for a shard: `share_media` has read the media
    and computed the positions before the row was cut.
    """
    held = shard_of(packed).features
    found: dict[str, Any] = _marked_grids(source, RowMedia.from_arguments(row), row)
    found |= {FEATURES[kind]: mark_kept(row[FEATURES[kind]], kept) for kind, kept in held.items()}
    if held and isinstance(source, PackedVisionLanguage):
        features, positions = (
            {kind: kept.stop - kept.start for kind, kept in held.items()},
            row_positions(given, packed),
        )
        return found | {
            "position_ids": None,
            "input_ids": _counted(row["input_ids"], features, lambda: positions),
        }
    return found | {"position_ids": row_positions(given, packed)}


@uncompiled
def share_media(
    source: Any, row: dict[str, Any], local: PackedSequence
) -> tuple[dict[str, Any], PackedSequence]:
    """Return the arguments of a row, with positions and with the media of one shard only, and the
    shard's record, with the `features` of these media.

    Args:
        source: the module that has `get_rope_index`.
        row: the arguments [1, T, ...] of a head, with the media of all documents.
        local: the record of the shard.

    Raises:
        BoundaryError, UnsupportedInput: see `PackedVisionLanguage.forward`; raised on all ranks
            alike.
    """
    batch, shard = local.whole_batch, shard_of(local)
    check_media_tensors(row, (1, batch.num_tokens))
    row = row | _without_items(row)
    media, ids, positions = read_media(
        source, batch.for_shape((1, batch.num_tokens)), row["position_ids"], row
    )
    row = {name: value for name, value in row.items() if name not in SECONDS} | {
        "position_ids": positions()
    }
    if ids is None:
        return row, local
    held, features = held_media(row, media, media_of(source, media), ids, shard)
    return row | held, replaced(local, shard=replace(shard, features=features))


def read_media(
    source: Any, packed: PackedSequence, given: Tensor | None, row: dict[str, Any]
) -> tuple[RowMedia, Tensor | None, Callable[[], Tensor]]:
    """Check the media of a row against its ids and documents.

    Args:
        source: the module that has `get_rope_index`.
        packed: the record, for the shape of `given`.
        given: the caller's positions, or None.
        row: the arguments of the row [1, T, ...].

    Returns:
        The media; the ids [1, T] on the host, None without media or ids; a function that returns
        the positions, [1, T] or [3 or 4, 1, T], on the device.

    Raises:
        BoundaryError: media, their sizes, features and placeholders do not agree.
        UnsupportedInput: see `PackedVisionLanguage.forward`.
    """
    media, features = RowMedia.from_arguments(row), _features_given(row)
    some = bool(features) or not media.is_empty
    if some:
        check_media_sizes(source.config, row, media)
        check_widths(source.config, row)
    ids = row.get("input_ids") if some or not packed.plain else None
    on_host: Any = None if ids is None else ids.detach().to("cpu")
    _check_features(source.config, media, features, None if packed.plain else on_host)
    if not some:
        return media, None, functools.partial(row_positions, given, packed)
    if ids is None or given is not None:
        _check_positions(source, packed, given, media, f"{' and '.join(features)} features")
        positions = functools.partial(row_positions, given, packed)
    else:
        positions = functools.partial(_positions, source, packed, on_host, media)
    if ids is not None:
        items_of_documents(source, on_host, packed.cu_seqlens_cpu, media)
    return media, on_host, positions


@uncompiled
def _positions(source: Any, packed: PackedSequence, ids: Tensor, media: RowMedia) -> Tensor:
    """Return the positions of a row, [4, 1, T] on the device, see `packed_positions`."""
    return to_device(
        packed_positions(source, ids, packed.cu_seqlens_cpu, media), packed.seq_idx.device
    )


def _counted(ids: Tensor, features: dict[str, int], positions: Callable[[], Tensor]) -> Tensor:
    """Return a view of the ids with the mark `COUNTED`: the number of features of each kind, and
    the function that returns the positions.
    """
    by_argument = {f"{kind}_features": count for kind, count in features.items()}
    return COUNTED.on_view(ids, CountedMedia(by_argument, positions))


def _marked_grids(source: Any, media: RowMedia, row: dict[str, Any]) -> dict[str, Tensor]:
    """Return the grids with the mark `PACKED`; on the host, where they are read, if the tower is
    patched and nothing wraps it.
    """
    ours = isinstance(source.visual, PackedVisionTower) and "forward" not in vars(source.visual)
    return {
        name: mark_packed(getattr(media, name) if ours else row[name])
        for name in PIXELS
        if row.get(name) is not None
    }


def _check_positions(
    source: Any, packed: PackedSequence, given: Tensor | None, media: RowMedia, what: str
) -> None:
    """Refuse media without positions and without ids to compute them from, and positions that count
    placeholders like text.
    """
    if given is None:
        raise UnsupportedInput(
            f"found {what} with inputs_embeds and neither input_ids nor position_ids; wanted one "
            "of them, because positions of media are made from the ids; pass position_ids of 4 rows"
        )
    kinds = media_of(source, media)[:2]
    if (
        not packed.plain
        and is_text(given)
        and any(bool((kind.run_sizes() > 1).any()) for kind in kinds)
    ):
        raise UnsupportedInput(
            f"found position_ids {list(given.shape)} that count every token, with {what}; wanted "
            "mRoPE positions, which such models were trained with; pass cu_seq_lens_q or seq_idx "
            "without position_ids, or 4 rows: text positions that restart, then "
            "get_rope_index of each document"
        )


def _features_given(row: dict[str, Any]) -> list[str]:
    outputs = row.get("mm_encoder_outputs") or {}
    return [
        kind
        for kind, name in FEATURES.items()
        if row.get(name) is not None or outputs.get(kind) is not None
    ]


def _check_features(config: Any, media: RowMedia, features: list[str], ids: Tensor | None) -> None:
    """Refuse features without the sizes of their items, and placeholders among `ids` without
    features.

    Only the sizes show which document a feature belongs to; without features, upstream would run on
    the embeddings of the placeholders.
    """
    sizes = {
        "image": media.image_grid_thw,
        "video": media.video_grid_thw,
        "audio": media.audio_lengths,
    }
    for kind, name in FEATURES.items():
        if kind in features:
            if sizes[kind] is None:
                raise BoundaryError(
                    f"found {kind} features without {SIZES[kind]}; wanted the sizes of their "
                    f"items, which say what belongs to which document; pass {SIZES[kind]} too"
                )
            continue
        token = getattr(config, f"{kind}_token_id", None)
        found = 0 if ids is None or token is None else int((ids == token).sum())
        if found:
            raise BoundaryError(
                f"found {found} {kind} placeholders in a packed row without {name}; wanted the "
                f"{kind}s' features too; use "
                "hf_packfree.data.PackedVisionCollator: DataCollatorWithFlattening drops them"
            )
