"""Positions of documents with images, videos and audio: upstream's own `get_rope_index`, one
document at a time.

`get_rope_index` gets host tensors, because it reads every token and grid on the host. A position is
four numbers: the token's index in its document, which shows where documents start, and time, height
and width, which the rotary embedding reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hf_packfree.errors import BoundaryError, UnsupportedInput, in_short
from hf_packfree.models.media_keywords import PIXELS, SECONDS
from hf_packfree.packing.media import Media, media_offsets

_SECONDS = ("second_per_grid_ts", "second_per_grids")
"""The parameters of `get_rope_index` for the seconds between two grids of a video."""
_FAILS = (IndexError, KeyError, RuntimeError, StopIteration, ValueError)
"""What `get_rope_index` raises where media do not stand between their own tokens."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RowMedia:
    """The sizes and types of the media of a row or of a document, on the host; items in reading
    order, None where there are none.

    Attributes:
        image_grid_thw, video_grid_thw: int64 [M, 3], the number of patches of each item in time,
            height and width.
        seconds_per_grid: float or int [M], the seconds between two grids of each video.
        audio_lengths: int64 [M], the number of frames of each audio.
        mm_token_type_ids: integers [1, T]; 1 where a token stands for an image, 2 for a video;
            computed from the ids if None.
        use_audio_in_video: whether the tokens of videos' sound are between the videos' own tokens;
            None: read from the ids.
    """

    image_grid_thw: Tensor | None = None
    video_grid_thw: Tensor | None = None
    seconds_per_grid: Tensor | None = None
    audio_lengths: Tensor | None = None
    mm_token_type_ids: Tensor | None = None
    use_audio_in_video: bool | None = None

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> RowMedia:
        """Return the media of a forward's arguments or a processor's output, with tensors copied to
        the host.
        """
        frames = arguments.get("feature_attention_mask")
        given: dict[str, Any] = {
            "image_grid_thw": arguments.get("image_grid_thw"),
            "video_grid_thw": arguments.get("video_grid_thw"),
            "seconds_per_grid": _first_given(arguments, *SECONDS),
            "audio_lengths": arguments.get("audio_feature_lengths")
            if frames is None
            else frames.sum(-1),
            "mm_token_type_ids": arguments.get("mm_token_type_ids"),
            "use_audio_in_video": arguments.get("use_audio_in_video"),
        }
        for name, value in given.items():
            given[name] = value.detach().to("cpu") if isinstance(value, Tensor) else value
        return cls(**given)

    @property
    def is_empty(self) -> bool:
        """Whether there is no item of any kind."""
        items = (self.image_grid_thw, self.video_grid_thw, self.audio_lengths)
        return all(item is None or len(item) == 0 for item in items)


def rope_source(config: Any) -> Any:
    """Return an object with upstream's `get_rope_index` for a model of this configuration, without
    weights.

    For code without a model, such as a collator in a worker process.

    Raises:
        UnsupportedInput: upstream's models of this configuration have no such method.
    """
    modeling = import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    for cls in vars(modeling).values():
        if (
            isinstance(cls, type)
            and hasattr(cls, "get_rope_index")
            and getattr(cls, "config_class", None) is type(config)
        ):
            source: Any = object.__new__(cls)
            vars(source).update(
                config=config, spatial_merge_size=config.vision_config.spatial_merge_size
            )
            return source
    raise UnsupportedInput(
        f"found a {type(config).__name__}, whose model has no get_rope_index; wanted the "
        "configuration of a vision-language model, the one that holds vision_config and "
        "text_config; pass model.config, of an omni model its thinker's"
    )


def media_of(source: Any, row: RowMedia) -> list[Media]:
    """Return the media of a row as placeholders are counted, one `Media` for each kind: see
    `hf_packfree.packing.media`.

    Args:
        source: the module that has `get_rope_index`, or what `rope_source` returns.
        row: the media of one or several documents.
    """
    config, kinds = source.config, []
    with_text_between_frames = not counts_seconds(source)
    audio = getattr(config, "audio_token_id", None)
    for name, grids in (("image", row.image_grid_thw), ("video", row.video_grid_thw)):
        grids = (
            torch.zeros(0, 3, dtype=torch.int64, device="cpu") if grids is None else grids.long()
        )
        runs: Tensor | None = torch.ones(len(grids), dtype=torch.int64, device="cpu")
        if name == "video":
            runs = None if audio is not None else grids[:, 0] if with_text_between_frames else runs
        sizes = grids.prod(-1) // config.vision_config.spatial_merge_size**2
        kinds.append(
            Media(name=name, token=getattr(config, f"{name}_token_id"), sizes=sizes, runs=runs)
        )
    if audio is not None:
        frames = (
            torch.zeros(0, dtype=torch.int64, device="cpu")
            if row.audio_lengths is None
            else row.audio_lengths.long()
        )
        sizes = audio_tokens(frames, getattr(config.audio_config, "n_window", 50))
        kinds.append(Media(name="audio", token=audio, sizes=sizes))
    return kinds


def counts_seconds(source: Any) -> bool:
    """Whether a family's positions of video frames depend on their seconds; other families write
    times as text.
    """
    return bool(_parameters(source) & set(_SECONDS))


def audio_tokens(frames: Tensor, n_window: int = 50) -> Tensor:
    """Return the number of tokens of audios of `frames` frames: 13 for each full chunk of 2 *
    n_window frames, and the remaining frames halved three times.
    """
    rest = frames % (2 * n_window)
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + frames // (2 * n_window) * 13


def document_positions(source: Any, input_ids: Tensor, media: RowMedia) -> Tensor:
    """Return the positions of one document, from upstream's `get_rope_index` for this document
    alone.

    Args:
        source: the module that has `get_rope_index`, or what `rope_source` returns.
        input_ids: int64 [1, s] on the host, without padding.
        media: those of this document only.

    Returns:
        [4, 1, s] on the host: 0 to s - 1, then time, height and width; int64, or float32 in
        families whose positions have fractions.

    Raises:
        UnsupportedInput: the document has videos with sound and videos without.
    """
    text = torch.arange(input_ids.shape[1], device="cpu")[None]
    if media.is_empty:
        return text.expand(4, -1, -1)
    wanted = _parameters(source)
    given: dict[str, Any] = {
        "image_grid_thw": media.image_grid_thw,
        "video_grid_thw": media.video_grid_thw
        if counts_seconds(source)
        else _by_frame(media.video_grid_thw),
        # only releases without token types need the mask; in others it changes nothing, and
        # selecting tokens by it takes all of the host's threads
        "attention_mask": None if "mm_token_type_ids" in wanted else torch.ones_like(input_ids),
        "mm_token_type_ids": media.mm_token_type_ids,
        "audio_seqlens": media.audio_lengths,
        **dict.fromkeys(_SECONDS, media.seconds_per_grid),
    }
    if "mm_token_type_ids" in wanted and media.mm_token_type_ids is None:
        given["mm_token_type_ids"] = token_types(source.config, input_ids)
    if "use_audio_in_video" in wanted:
        given["use_audio_in_video"] = _has_audio_in_video(source.config, input_ids)
    given = {name: value for name, value in given.items() if name in wanted}
    rows, _ = source.get_rope_index(input_ids, **given)
    return torch.cat((text.to(rows.dtype)[None], rows.to("cpu")))


def _by_frame(grids: Tensor | None) -> Tensor | None:
    """Return one grid for each frame, for videos with text between their frames, as transformers
    5.3 wants.

    Other releases split grids into frames by themselves, which changes nothing on these.
    """
    if grids is None:
        return None
    frames = [[1, height, width] for time, height, width in grids.tolist() for _ in range(time)]
    return torch.tensor(frames, dtype=grids.dtype, device="cpu").view(-1, 3)


def items_of_documents(
    source: Any, input_ids: Tensor, cu_seqlens: Tensor, media: RowMedia
) -> dict[str, Tensor]:
    """Return {kind of media: int64 [N+1]}, which items belong to which document of a row, see
    `media_offsets`.

    Args:
        source, input_ids, cu_seqlens, media: see `packed_positions`.

    Raises:
        BoundaryError: see `packed_positions`.
    """
    _check_types(source.config, input_ids, media.mm_token_type_ids)
    return {
        kind.name: media_offsets(input_ids[0], cu_seqlens, kind) for kind in media_of(source, media)
    }


def packed_positions(source: Any, input_ids: Tensor, cu_seqlens: Tensor, media: RowMedia) -> Tensor:
    """Return the positions of a row, with those of every document from `document_positions`.

    Args:
        source: the module that has `get_rope_index`, or what `rope_source` returns.
        input_ids: int64 [1, T] on the host.
        cu_seqlens: int32 [N+1] on the host, offsets of the documents.
        media: those of all documents.

    Returns:
        [4, 1, T] on the host, see `document_positions`.

    Raises:
        BoundaryError: media and placeholders do not agree, see `media_offsets`,
            `mm_token_type_ids` differ from the ids, or upstream cannot number a document.
        UnsupportedInput: a document has videos with sound and videos without, or
            `use_audio_in_video` is wrong for some video.
    """
    offsets = {
        name: items.tolist()
        for name, items in items_of_documents(source, input_ids, cu_seqlens, media).items()
    }
    bounds, parts = cu_seqlens.tolist(), []
    if media.use_audio_in_video is not None:
        _check_flag(source.config, input_ids, media.use_audio_in_video)
    for document, (start, end) in enumerate(zip(bounds, bounds[1:])):
        spans = {
            name: slice(items[document], items[document + 1]) for name, items in offsets.items()
        }
        own = _of_document(media, spans, slice(start, end))
        try:
            parts.append(document_positions(source, input_ids[:, start:end], own))
        except UnsupportedInput:
            raise
        except _FAILS as error:
            raise BoundaryError(
                f"found document {document} (tokens {start} to {end - 1}), whose media "
                f"transformers cannot number ({in_short(error)}); wanted each item between its own "
                "tokens of start and end; pass what the processor returned, uncut"
            ) from error
    return torch.cat(parts, -1)


def _of_document(media: RowMedia, spans: Mapping[str, slice], tokens: slice) -> RowMedia:
    """Return the media of one document; `spans` are {kind of media: the document's items}, `tokens`
    the document's tokens.
    """
    kind_of = {
        "image_grid_thw": "image",
        "video_grid_thw": "video",
        "seconds_per_grid": "video",
        "audio_lengths": "audio",
    }
    parts: dict[str, Any] = {}
    for field in fields(media):
        value = getattr(media, field.name)
        kind = kind_of.get(field.name)
        if value is not None and kind is not None:
            value = value[spans[kind]]
            value = value if len(value) else None
        elif isinstance(value, Tensor):
            value = value[:, tokens]
        parts[field.name] = value
    return RowMedia(**parts)


def _parameters(source: Any) -> frozenset[str]:
    """Return the names of the parameters of the family's `get_rope_index` in this release."""
    method = source.get_rope_index
    return _names_of(getattr(method, "__func__", method))


# reading a signature takes longer than numbering a document
@lru_cache(maxsize=64)
def _names_of(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def token_types(config: Any, input_ids: Tensor) -> Tensor:
    """Return int64 [1, s]: 1 at placeholders of images, 2 at placeholders of videos, else 0."""
    images, videos = input_ids == config.image_token_id, input_ids == config.video_token_id
    return images.long() + 2 * videos.long()


def numbered_by_upstream(source: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a forward's arguments with what upstream numbers media by, where the call has none:
    `mm_token_type_ids` made from the ids, or, in families without types, a mask of ones. Without
    them upstream counts every token, or raises.

    Args:
        source: see `packed_positions`.
        arguments: by name, of a call without a cache; unchanged without ids or grids, and with
            positions.
    """
    ids = arguments.get("input_ids")
    if (
        ids is None
        or all(arguments.get(name) is None for name in PIXELS)
        or arguments.get("position_ids") is not None
    ):
        return arguments
    typed = "mm_token_type_ids" in _parameters(source)
    name = "mm_token_type_ids" if typed else "attention_mask"
    if arguments.get(name) is not None:
        return arguments
    return arguments | {name: token_types(source.config, ids) if typed else torch.ones_like(ids)}


def _check_types(config: Any, input_ids: Tensor, types: Tensor | None) -> None:
    """Refuse `mm_token_type_ids` that do not match the ids' placeholders of images and videos."""
    if types is None:
        return
    for kind, token in ((1, config.image_token_id), (2, config.video_token_id)):
        wrong = ((types == kind) != (input_ids == token)).nonzero()
        if len(wrong):
            raise BoundaryError(
                "found mm_token_type_ids that differ from input_ids about token "
                f"{int(wrong[0, 1])} of the row: type {kind} is the token {token}; wanted the "
                "processor's, of the same batch; leave them out, the ids are enough"
            )


def _videos(config: Any, input_ids: Tensor) -> tuple[int, int]:
    """Return how many videos have their sound between their own tokens, and how many have no
    sound.
    """
    after_start = input_ids[0, 1:][input_ids[0, :-1] == config.vision_start_token_id]
    return int((after_start == config.audio_start_token_id).sum()), int(
        (after_start == config.video_token_id).sum()
    )


def _has_audio_in_video(config: Any, input_ids: Tensor) -> bool:
    with_sound, silent = _videos(config, input_ids)
    if with_sound and silent:
        raise UnsupportedInput(
            f"found {with_sound} videos with their sound and {silent} without in one document; "
            "wanted one kind in a document, because upstream numbers a document under one "
            "use_audio_in_video; split the document, or pass its position_ids"
        )
    return with_sound > 0


def _check_flag(config: Any, input_ids: Tensor, use_audio_in_video: bool) -> None:
    with_sound, silent = (
        _videos(config, input_ids) if hasattr(config, "audio_start_token_id") else (0, 0)
    )
    if silent if use_audio_in_video else with_sound:
        raise UnsupportedInput(
            f"found use_audio_in_video={use_audio_in_video} for a row of {with_sound} videos with "
            f"their sound and {silent} without; wanted a flag that is true of all, because it "
            "numbers their tokens; leave it out: which is which is read from the ids"
        )


def _first_given(arguments: Mapping[str, Any], *names: str) -> Any:
    value = next((arguments[name] for name in names if arguments.get(name) is not None), None)
    return torch.tensor(value, device="cpu") if isinstance(value, (list, tuple)) else value
