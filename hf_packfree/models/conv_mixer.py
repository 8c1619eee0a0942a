"""Token mixers that begin with a depthwise convolution, whose weights upstream and we read instead
of calling the module.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_packfree.errors import PatchConflict
from hf_packfree.models.base import Replacement
from hf_packfree.models.state import receive
from hf_packfree.packing import PackedSequence


class ConvMixer(Replacement):
    """Base of mixins for such token mixers: has the packed branch, `_mix`, and leaves everything
    else to upstream.
    """

    conv_name: ClassVar[str] = "conv1d"

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Mix tokens within documents if the keywords hold a record; otherwise run upstream's
        forward.

        Args:
            hidden_states: [1, T, D_model] of a packed row, [B, S, D_model] otherwise.

        Raises:
            PatchConflict: an adapter was put on the convolution.
            UnsupportedInput: the row is a tree of shared prefixes, and the mixer does not follow
                trees.
        """
        conv = getattr(self, self.conv_name)
        _refuse_adapters(conv, self.conv_name)
        packed = receive(self, kwargs)
        if packed is None:
            return super().forward(hidden_states, *args, **kwargs)
        with _weights_in_place(conv):
            return packed.zero_left_pad(self._mix(hidden_states, packed))

    def _mix(self, x: Tensor, packed: PackedSequence) -> Tensor:
        """Return the mixer's output [1, T, D_model] for a packed row."""
        raise NotImplementedError

    def calls(self, name: str, part: nn.Module, x: Tensor) -> bool:
        """Whether the packed branch calls a child: all children but the convolution."""
        return name != self.conv_name


def _refuse_adapters(conv: nn.Module, name: str) -> None:
    """Refuse an adapter on the convolution, which would never run or be trained."""
    if not isinstance(conv, nn.Conv1d):
        raise PatchConflict(
            f"found {name} wrapped in a {type(conv).__name__} of {type(conv).__module__}: its "
            "weights are read directly, so what wraps it would neither run nor be trained; wanted "
            f"a plain Conv1d; leave {name} out of target_modules and modules_to_save"
        )


class _weights_in_place:
    """Load an offloaded convolution's weights while they are read without calling its forward, by
    accelerate's hook.
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
