"""A tower that has nothing to do on this rank while other ranks run theirs: it gets an image of zeros, which changes nothing.

Without it DistributedDataParallel waits for gradients that never come, and FSDP for parameters that this rank does not gather.
The image is no part of the row: as tokens it would be a document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_leaves

_GIVEN = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}


def run_beside_idle_tower(model: Any, forward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Run upstream's forward of a vision-language model; the idle tower's zeros are added to the embeddings of its tokens.

    After the embeddings, where upstream runs the tower: sharded parameters have to be gathered in one order on all ranks.

    Args:
        model: holds the tower as `visual`.
        forward: upstream's.
        arguments: all of it, by name.
    """
    kinds = _idle_kinds(model, arguments)
    if not kinds:
        return forward(**arguments)
    if arguments.get("inputs_embeds") is not None:
        return forward(**{**arguments, "inputs_embeds": _with_zeros(arguments["inputs_embeds"], model, kinds)})
    embeddings = model.get_input_embeddings()
    handle = embeddings.register_forward_hook(lambda module, given, embeds: _with_zeros(embeds, model, kinds))
    try:
        return forward(**arguments)
    finally:
        handle.remove()


def _idle_kinds(model: Any, arguments: dict[str, Any]) -> Sequence[str]:
    """Return the kinds to run on zeros: all that are missing where the tower is sharded, one of them where none came."""
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return ()
    if arguments.get("past_key_values") is not None or arguments.get("use_cache"):
        return ()
    missing = [kind for kind, names in _GIVEN.items() if all(arguments.get(name) is None for name in names)]
    if _is_sharded(model.visual):
        return missing
    learns = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.visual.parameters())
    return missing[:1] if learns and model.training and len(missing) == len(_GIVEN) else ()


def _is_sharded(tower: nn.Module) -> bool:
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in tower.parameters())


def _with_zeros(embeds: Tensor, model: Any, kinds: Sequence[str]) -> Tensor:
    """Return the embeddings plus 0, behind which are all of the tower's parameters."""
    for kind in kinds:
        config = model.config.vision_config
        side = config.spatial_merge_size
        numbers = config.in_channels * config.temporal_patch_size * config.patch_size**2
        pixels = torch.zeros(side * side, numbers, device=embeds.device)
        features = getattr(model, f"get_{kind}_features")(pixels, torch.tensor([[1, side, side]], device=embeds.device))
        for leaf in tree_leaves(features):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                embeds = embeds + (leaf.sum() * 0.0).to(embeds.device, embeds.dtype)
    return embeds
