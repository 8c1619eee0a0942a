"""Writing features of media to their placeholders, without making the host wait.

Upstream scatters by a boolean mask and adds by a boolean index, for which the host waits until the
device has counted the mask's tokens, in the backward pass or in both passes. The number of
placeholders is known to be that of the features, so here their places are computed on the device
without a count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_packfree.models.trunk import PackedTrunk
from hf_packfree.packing.marks import PLACES


class PlaceholderMask(Tensor):
    """A mask [B, S, 1 or D] of placeholders that were counted on the host: there are as many
    placeholders as rows of features.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `masked_scatter` by the placeholders' places, and copy the places to masks [B, S]
        that are sliced from this one; run any other operation as for a plain mask.
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
    """Return the flat indices, int64 [count], of the `count` true elements of a mask [B, S], in
    order.
    """
    return torch.searchsorted(
        mask.flatten().cumsum(0), torch.arange(1, count + 1, device=mask.device)
    )


class PackedDeepstack(PackedTrunk):
    """Put in front of a text model that adds features of images to the hidden states between its
    first layers.
    """

    def _deepstack_process(
        self, hidden_states: Tensor, visual_pos_masks: Tensor, visual_embeds: Tensor
    ) -> Tensor:
        """Return hidden states [B, S, D] plus features [n, D] at the tokens that a mask [B, S]
        marks; by upstream's method if the mask has no `PLACES`.
        """
        places = PLACES.of(visual_pos_masks)
        if places is None:
            upstream: Any = super()
            return upstream._deepstack_process(hidden_states, visual_pos_masks, visual_embeds)
        features = visual_embeds.to(hidden_states.device, hidden_states.dtype)
        added = hidden_states.flatten(0, 1).index_add(0, places.to(features.device), features)
        return added.view_as(hidden_states)
