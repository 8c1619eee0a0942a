"""Features of media at their placeholders, put there without a host wait.

Upstream scatters by a mask, whose tokens the backward pass counts on the device, and adds by a
boolean index, which counts in both directions. There is a feature for each of them, so that their
places are computed on the device alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_packfree.models.trunk import PackedTrunk
from hf_packfree.packing.marks import PLACES


class PlaceholderMask(Tensor):
    """A mask [B, S, 1 or D] of placeholders that were counted on the host: what is scattered by
    it has a row for each.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run any operation as if this were an ordinary mask; scatter by places, which are
        handed on to masks [B, S].
        """
        mask = args[0]
        with torch._C.DisableTorchFunctionSubclass():
            if (
                func is Tensor.masked_scatter
                and not kwargs
                and isinstance(args[1], PlaceholderMask)
            ):
                embeds, mask, features = args
                places = _places(mask[..., 0], len(features))
                PLACES.put(mask, places)
                return embeds.flatten(0, 1).index_copy(0, places, features).view_as(embeds)
            found = func(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and (of_mask := PLACES.of(mask)) is not None:
            PLACES.put(found, of_mask)
        return found


def _places(mask: Tensor, count: int) -> Tensor:
    """Return the places, int64 [count], of the `count` true elements of a mask [B, S], in order."""
    return torch.searchsorted(
        mask.flatten().cumsum(0), torch.arange(1, count + 1, device=mask.device)
    )


class PackedDeepstack(PackedTrunk):
    """Put in front of a text model that adds features of images to the states between its first
    layers.
    """

    def _deepstack_process(
        self, hidden_states: Tensor, visual_pos_masks: Tensor, visual_embeds: Tensor
    ) -> Tensor:
        """Return states [B, S, D] plus features [n, D] at what a mask [B, S] marks; upstream's
        where nobody counted it.
        """
        places = PLACES.of(visual_pos_masks)
        if places is None:
            upstream: Any = super()
            return upstream._deepstack_process(hidden_states, visual_pos_masks, visual_embeds)
        features = visual_embeds.to(hidden_states.device, hidden_states.dtype)
        added = hidden_states.flatten(0, 1).index_add(0, places.to(features.device), features)
        return added.view_as(hidden_states)
