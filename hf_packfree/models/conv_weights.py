"""Depthwise convolutions of which upstream and we read the weights, instead of calling them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_packfree.errors import PatchConflict


def refuse_adapters(conv: nn.Module, name: str = "conv1d") -> None:
    """Refuse what would never be trained.

    Args:
        conv: the convolution of a mixer.
        name: the mixer's attribute that holds it.

    Raises:
        PatchConflict: something wraps it.
    """
    if not isinstance(conv, nn.Conv1d):
        raise PatchConflict(
            f"found {name} wrapped in a {type(conv).__name__} of {type(conv).__module__}: its "
            "weights are read directly, so what wraps it would neither run nor be trained; wanted "
            f"a plain Conv1d; leave {name} out of target_modules and modules_to_save"
        )


class conv_weights_in_place:
    """Bring an offloaded convolution's weights in while they are read directly instead of
    through its forward.
    """

    def __init__(self, conv: nn.Module) -> None:
        self.conv = conv
        self.hook: Any = vars(conv).get("_hf_hook")

    def __enter__(self) -> None:
        if self.hook is not None:
            self.hook.pre_forward(self.conv)

    def __exit__(self, *error: object) -> None:
        if self.hook is not None:
            self.hook.post_forward(self.conv, torch.empty(0))


__all__ = ["conv_weights_in_place", "refuse_adapters"]
