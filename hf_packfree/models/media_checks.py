"""Checks that refuse media which no processor returns, by the name of the argument; torch would
only report shapes that differ.

Dtypes and shapes are known on the host; values are read from copies on the host, which planning
needs anyway. Shapes: M items of a kind, N patches of all images or of all videos.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_packfree.errors import BoundaryError
from hf_packfree.models.media_keywords import PIXELS

_PROCESSORS = "pass what the processor returned for these documents"
_SHAPES = {
    **dict.fromkeys(PIXELS, ("an integer", "[M, 3]")),
    **dict.fromkeys(PIXELS.values(), ("a", "[N, values of a patch]")),
    "feature_attention_mask": ("an integer", "[M, frames]"),
    "audio_feature_lengths": ("an integer", "[M]"),
}


def check_media_tensors(given: Mapping[str, Any], shape: tuple[int, ...] | None = None) -> None:
    """Refuse arguments of media that are not tensors of the expected dtype and shape.

    Args:
        given: arguments by name; those that are None or empty are not checked.
        shape: (B, S) of the tokens, None where there are none.

    Raises:
        BoundaryError: an argument is no tensor, or has another dtype or shape.
    """
    for name, (integer, sizes) in _SHAPES.items():
        value = given.get(name)
        if value is None or isinstance(value, Tensor) and value.ndim and not value.numel():
            continue
        if not (isinstance(value, Tensor) and _fits(value, bool(integer != "a"), sizes)):
            raise BoundaryError(
                f"found {name} {_kind(value)}; wanted {integer} tensor {sizes}, with values; "
                f"{_PROCESSORS}"
            )
    types = given.get("mm_token_type_ids")
    if shape is not None and types is not None and getattr(types, "shape", None) != shape:
        raise BoundaryError(
            f"found mm_token_type_ids {_kind(types)}; wanted a tensor {list(shape)}, one type for "
            "each token; leave them out, the ids are enough"
        )


def _fits(value: Tensor, integer: bool, sizes: str) -> bool:
    whole = not (value.is_floating_point() or value.is_complex())
    return (
        value.ndim == sizes.count(",") + 1
        and (whole or not integer)
        and (not sizes.endswith(" 3]") or value.shape[1] == 3)
        and value.device.type != "meta"
    )


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"as a {type(value).__name__}"
    where = " on meta" if value.device.type == "meta" else ""
    return f"{value.dtype} {list(value.shape)}{where}"


def check_media_sizes(config: Any, given: Mapping[str, Any], media: Any) -> None:
    """Refuse media whose patches, seconds or frames do not match the sizes of the items.

    Args:
        config: the vision-language model's.
        given: arguments by name, see `check_media_tensors`.
        media: the sizes of the items on the host, a `RowMedia`.

    Raises:
        BoundaryError: a grid is no multiple of the merge size, the number of patches is not that of
            the grids, the seconds are not one for each video, an audio has no frame, or its
            features do not have the mask's shape.
    """
    for name, pixels in PIXELS.items():
        grids = getattr(media, name)
        if grids is not None and len(grids):
            _check_grids(name, grids, config.vision_config.spatial_merge_size)
        if grids is not None and isinstance(given.get(pixels), Tensor):
            _check_patches(name, grids, pixels, given[pixels])
    videos, seconds = media.video_grid_thw, media.seconds_per_grid
    if videos is not None and seconds is not None and tuple(seconds.shape) != (len(videos),):
        raise BoundaryError(
            f"found seconds per grid {list(seconds.shape)} for {len(videos)} videos; wanted one "
            f"for each; {_PROCESSORS}"
        )
    _check_audio(given, media.audio_lengths)


def _check_grids(name: str, grids: Tensor, merge: int) -> None:
    wrong = (grids < 1).any(-1) | (grids[:, 1:] % merge != 0).any(-1)
    if bool(wrong.any()):
        item = int(wrong.long().argmax())
        raise BoundaryError(
            f"found {name}[{item}]={grids[item].tolist()}; wanted patches in time, height and "
            f"width, 1 at least, height and width multiples of {merge}, which become one token; "
            f"{_PROCESSORS}"
        )


def _check_patches(name: str, grids: Tensor, pixels: str, values: Tensor) -> None:
    wanted = int(grids.prod(-1).sum())
    found = len(values) if values.numel() else 0
    if found != wanted:
        raise BoundaryError(
            f"found {pixels} of {found} patches, where {name} counts {wanted}; wanted those of the "
            f"same items, in their order; {_PROCESSORS}"
        )


def _check_audio(given: Mapping[str, Any], frames: Tensor | None) -> None:
    """Refuse empty audios, and features [M, mel bins, frames] whose mask has another shape."""
    if frames is None:
        return
    if bool((frames < 1).any()):
        item = int((frames < 1).long().argmax())
        raise BoundaryError(
            f"found audio {item} of {int(frames[item])} frames; wanted one frame at least; leave "
            "empty audios out"
        )
    audio, mask = given.get("input_features"), given.get("feature_attention_mask")
    if mask is None or audio is None:
        return
    shape = tuple(audio.shape) if isinstance(audio, Tensor) else ()
    if len(shape) != 3 or (shape[0], shape[2]) != tuple(mask.shape):
        raise BoundaryError(
            f"found input_features {_kind(audio)} with feature_attention_mask "
            f"{list(mask.shape)}; wanted [M, mel bins, frames] with [M, frames]; {_PROCESSORS}"
        )


def values_of_a_patch(vision: Any) -> int:
    """Return how many values a patch has, for the tower with the config `vision`."""
    channels: int = getattr(vision, "in_channels", 3)
    return channels * vision.temporal_patch_size * vision.patch_size**2


def check_widths(config: Any, given: Mapping[str, Any]) -> None:
    """Refuse patches and audio features of another size than the model's towers take.

    Raises:
        BoundaryError: a patch, or a frame, has another number of values.
    """
    patch = values_of_a_patch(config.vision_config)
    audio = getattr(config, "audio_config", None)
    wanted = dict.fromkeys(PIXELS.values(), (1, patch, "a patch"))
    if audio is not None and given.get("feature_attention_mask") is not None:
        wanted["input_features"] = (1, audio.num_mel_bins, "a frame")
    for name, (axis, size, of) in wanted.items():
        value = given.get(name)
        if isinstance(value, Tensor) and value.numel() and value.shape[axis] != size:
            raise BoundaryError(
                f"found {name} {list(value.shape)}; wanted {size} values of {of}, as this model's "
                "towers take; use the model's own processor"
            )
