"""Run the towers of a rank whose batch has no images, videos or audio on zeros, and add 0 times
their features to the embeddings.

Otherwise DistributedDataParallel waits for gradients that never come, and FSDP for parameters that
this rank does not gather. The zeros are not added to the row as tokens, where they would be a
document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from hf_packfree.models.compat import cache_of
from hf_packfree.models.media_checks import values_of_a_patch
from hf_packfree.models.media_keywords import AUDIO_SIZES, FEATURES, SIZES

_TOWERS: dict[str, dict[str, tuple[str, ...]]] = {
    "audio_tower": {"audio": (FEATURES["audio"], *AUDIO_SIZES)},
    "visual": {kind: (FEATURES[kind], SIZES[kind]) for kind in ("image", "video")},
}
"""{tower: {kind of media: its arguments}}, in the order in which upstream runs the kinds."""
_FRAMES = 8
"""The number of frames of the audio of zeros, which becomes one token."""


def run_with_absent_media(
    model: Any, forward: Callable[..., Any], arguments: dict[str, Any]
) -> Any:
    """Run upstream's forward of a vision-language model, with the towers of absent media on zeros.

    The towers run at the point of the forward where upstream would run them, since all ranks have
    to gather sharded parameters in the same order.

    Args:
        model: holds the towers, as `visual` and `audio_tower`.
        forward: upstream's.
        arguments: all that `forward` takes, by name.
    """
    kinds = _absent_kinds(model, arguments)
    if not kinds:
        return forward(**arguments)
    before = model.get_input_embeddings()
    if arguments.get("input_features") is not None:
        before = model.audio_tower
    elif arguments.get("inputs_embeds") is not None:
        return forward(
            **{**arguments, "inputs_embeds": _with_zeros(arguments["inputs_embeds"], model, kinds)}
        )
    handle = before.register_forward_hook(
        lambda module, given, output: _with_zeros(output, model, kinds)
    )
    try:
        return forward(**arguments)
    finally:
        handle.remove()


def _absent_kinds(model: Any, arguments: dict[str, Any]) -> Sequence[str]:
    """Return the kinds of media to run on zeros: every missing kind of a sharded tower; one kind of
    any other tower, if all its kinds are missing and other ranks wait for its gradients.
    """
    if not (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    ):
        return ()
    if cache_of(arguments) is not None or arguments.get("use_cache"):
        return ()
    packed = arguments.get("packed_sequence")
    # the ranks of a shard exchange gradients in every backward
    waited_for = model.training or packed and packed.is_shard
    kinds: list[str] = []
    for attribute, given in _TOWERS.items():
        tower = getattr(model, attribute, None)
        if tower is None:
            continue
        missing = [
            kind
            for kind, names in given.items()
            if all(arguments.get(name) is None for name in names)
        ]
        if _is_sharded(tower):
            kinds += missing
        elif waited_for and len(missing) == len(given) and _learns(tower):
            kinds += missing[:1]
    return kinds


def _is_sharded(tower: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in tower.parameters())


def _learns(tower: nn.Module) -> bool:
    return torch.is_grad_enabled() and any(
        parameter.requires_grad for parameter in tower.parameters()
    )


def _with_zeros(output: Any, model: Any, kinds: Sequence[str]) -> Any:
    """Return embeddings, or a tower's output, plus 0 times the features of zeros for each of
    `kinds`, so that every parameter of the towers gets a gradient.
    """
    for kind in kinds:
        features = _features_of_zeros(
            model, kind, next(leaf for leaf in tree_leaves(output) if _is_real(leaf)).device
        )
        for leaf in filter(_is_real, tree_leaves(features)):
            output = tree_map(partial(_plus, leaf.sum() * 0.0), output)
    return output


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _plus(zero: Tensor, leaf: Any) -> Any:
    return leaf + zero.to(leaf.device, leaf.dtype) if _is_real(leaf) else leaf


def _features_of_zeros(model: Any, kind: str, device: torch.device) -> Any:
    """Return the features that upstream's method computes from the smallest item of a kind, all
    zeros: one token.
    """
    if kind == "audio":
        mel = torch.zeros(1, model.config.audio_config.num_mel_bins, _FRAMES, device=device)
        return model.get_audio_features(
            mel, feature_attention_mask=torch.ones(1, _FRAMES, dtype=torch.int64, device=device)
        )
    config = model.config.vision_config
    side = config.spatial_merge_size
    pixels = torch.zeros(side * side, values_of_a_patch(config), device=device)
    return getattr(model, f"get_{kind}_features")(
        pixels, torch.tensor([[1, side, side]], device=device)
    )
