"""Differences between releases of transformers that our code depends on: a constant for each, with
the release that ends the difference.

When the oldest supported release reaches the one in a constant, delete the constant and the code
for older releases. Elsewhere only floors of families and the newest release that was tried are
compared with the installed one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from packaging.version import Version

from hf_packfree.versions import VERSIONS

RELEASE = Version(Version(transformers.__version__).base_version)

NEWEST_TRIED = Version(VERSIONS["transformers"].cpu[1])
"""The newest release that `tests/compat/run.py` has run on; under a newer one, a model is measured
before it is patched.
"""

MISREADS_IMAGES_WITHOUT_MASK = Version("5.4.0") > RELEASE
"""The text model reads the temporal row of an image's positions as text positions, so that each
token becomes a document of its own.
"""

IMAGES_COUNT_SECONDS = Version("5.3.0") <= RELEASE < Version("5.5.4")
"""Qwen2.5-VL scales the temporal positions of images, too, by the rate of its videos."""

LAYERS_DROP_KEYWORDS = Version("5.9.0") > RELEASE
"""Upstream's decoder layers pass no keywords to a linear mixer, so that a layer that cannot be
swapped loses the record.
"""

AUDIO_IGNORES_WINDOWS = Version("5.9.0") > RELEASE
"""The sdpa and eager attention of audio towers ignores offsets: audios of one call attend to each
other, and beyond their windows.
"""

TOWERS_MAKE_POSITIONS = Version("5.9.0") > RELEASE
"""Vision towers take no positions of patches and no offsets of images as keywords, and compute both
on the device.
"""

LINEAR = "mamba" if Version("5.13.0") > RELEASE else "linear_attention"
"""The name of layers with Mamba-2 in a hybrid's `layer_types`."""

FULL = "attention" if Version("5.13.0") > RELEASE else "full_attention"
"""The name of layers with attention in a hybrid's `layer_types`."""

MASKS_ARE_TENSORS = Version("5.13.0") > RELEASE
"""The text model takes one mask tensor, and no dict of masks by kind of layer."""

MISREADS_PADDING_OF_ONE_ROW = Version("5.15.0") > RELEASE
"""Upstream zeroes padding only in batches of two rows or more, so that a single left-padded row is
wrong.
"""

LOSS_WITH_MEDIA_TAKES_NO_COUNT = Version("5.17.0") > RELEASE
"""Qwen3.5's and Qwen3-VL's heads with towers do not pass `num_items_in_batch` to their loss,
whatever `accepts_loss_kwargs` says.
"""

MASKS_BEFORE_PLACEHOLDERS = Version("5.18.0") > RELEASE
"""A processor's mask of what the assistant wrote is of the text before placeholders of media are
repeated, and so of other tokens.
"""

THINKER_HOLDS_TOWERS = Version("5.21.0") > RELEASE
"""Qwen3-Omni's class with the language modelling head holds the towers and the text model itself:
one forward computes the loss from pixels.
"""

CACHE = "past_key_values" if Version("5.24.0") > RELEASE else "cache"
"""The keyword by which a model's forward takes a cache."""

_MASKED = "full_attention", "linear_attention", "sliding_attention"
"""The keys by which text models look up masks in a dict, which need not be the kinds of their
layers: Falcon-H1's layers are "hybrid".
"""

CACHES = "cache", "past_key_values"
"""The keywords by which callers may pass a cache: releases that take the first one take the second,
too, with a warning.
"""


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among a forward's arguments, None where there is none."""
    return next((arguments[name] for name in CACHES if arguments.get(name) is not None), None)


def tokens_seen(cache: Any) -> int:
    """Return how many tokens a cache holds; if no layer of the cache counts tokens, 1 for any
    number above 0.
    """
    if cache is None:
        return 0
    try:
        return cache.get_seq_length()
    except ValueError:
        # the cache has only linear layers
        return int(cache.has_previous_state())


def masks_the_layers_ignore(config: Any, device: torch.device) -> Any:
    """Return an `attention_mask` with which the text model builds no masks; our layers read the
    record instead.
    """
    # upstream passes a 4-D mask on unchanged, whatever its size; upstream takes a dict only if the
    # config's class declares `layer_types` (a checkpoint may set them for any class) and some layer
    # attends: otherwise upstream builds one mask for all layers
    if (
        MASKS_ARE_TENSORS
        or not hasattr(type(config), "layer_types")
        or set(config.layer_types) == {LINEAR}
    ):
        return torch.ones(1, 1, 1, 1, device=device)
    return dict.fromkeys((*config.layer_types, *_MASKED))
