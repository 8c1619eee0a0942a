"""Where releases of transformers differ in what we rely on: one name per difference, with the
release that ends it.

Nothing else in this package reads transformers' version. When the oldest supported release passes
the one that a constant names, the constant and the lines that read it go.
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
"""The newest release that `tests/compat/run.py` has run on; a newer one is measured before it is
patched.
"""

MISREADS_IMAGES_WITHOUT_MASK = Version("5.4.0") > RELEASE
"""The text model takes the temporal row of an image's positions for its text positions: each
token a document of its own.
"""

IMAGES_COUNT_SECONDS = Version("5.3.0") <= RELEASE < Version("5.5.4")
"""Qwen2.5-VL multiplies the time of images, too, by the rate of its videos."""

LAYERS_DROP_KEYWORDS = Version("5.9.0") > RELEASE
"""Upstream's decoder layers hand no keywords to a linear mixer: one that cannot be swapped would
lose the record.
"""

AUDIO_IGNORES_WINDOWS = Version("5.9.0") > RELEASE
"""Audio towers' sdpa and eager attention reads no offsets: audios of one call attend to each
other, and beyond windows.
"""

TOWERS_MAKE_POSITIONS = Version("5.9.0") > RELEASE
"""Vision towers take neither the patches' positions nor the offsets of images as keywords, and
make both on the device.
"""

LINEAR = "mamba" if Version("5.13.0") > RELEASE else "linear_attention"
"""The kind of a layer with Mamba-2, in hybrids."""

FULL = "attention" if Version("5.13.0") > RELEASE else "full_attention"
"""The kind of their layers with attention."""

MASKS_ARE_TENSORS = Version("5.13.0") > RELEASE
"""The text model takes one mask tensor and cannot be handed the layers' masks as a dict."""

MISREADS_PADDING_OF_ONE_ROW = Version("5.15.0") > RELEASE
"""Padding is zeroed in batches of two rows and more only: a left-padded single row is wrong
upstream.
"""

LOSS_WITH_MEDIA_TAKES_NO_COUNT = Version("5.17.0") > RELEASE
"""Qwen3.5's and Qwen3-VL's classes with towers give their loss no `num_items_in_batch`, whatever
`accepts_loss_kwargs` says.
"""

THINKER_HOLDS_TOWERS = Version("5.21.0") > RELEASE
"""Omni's class with the language modelling head holds towers and text model itself: one forward
from pixels to the loss.
"""

CACHE = "past_key_values" if Version("5.24.0") > RELEASE else "cache"
"""The keyword of a model's cache."""

_MASKED = "full_attention", "linear_attention", "sliding_attention"
"""What text models look masks up by, which need not be the kinds of their layers: those of
Falcon-H1 are "hybrid".
"""

CACHES = "cache", "past_key_values"
"""What callers may name it: releases with the first take the second, too, and warn of it."""


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among a forward's arguments, None where there is none."""
    return next((arguments[name] for name in CACHES if arguments.get(name) is not None), None)


def tokens_seen(cache: Any) -> int:
    """Return how many tokens a cache holds; 1 for any number where no layer of it counts them."""
    if cache is None:
        return 0
    try:
        return cache.get_seq_length()
    except ValueError:
        # of nothing but linear layers
        return int(cache.has_previous_state())


def masks_the_layers_ignore(config: Any, device: torch.device) -> Any:
    """Return an `attention_mask` from which the text model builds none of its own: our layers
    read the record.
    """
    # a 4-D mask is passed on as it is, whatever its size; a checkpoint may name kinds that its
    # class does not know; where no layer attends, one mask is made, and a dict is none
    if (
        MASKS_ARE_TENSORS
        or not hasattr(type(config), "layer_types")
        or set(config.layer_types) == {LINEAR}
    ):
        return torch.ones(1, 1, 1, 1, device=device)
    return dict.fromkeys((*config.layer_types, *_MASKED))
