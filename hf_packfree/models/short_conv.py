"""Short convolutions between two gates, the mixers of LFM2, over a packed row.

Shapes: T tokens of the row, D channels, W taps.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_packfree.models.base import Sizes, size_of, size_of_linear
from hf_packfree.models.conv_mixer import ConvMixer
from hf_packfree.models.state import state_of
from hf_packfree.ops.conv import causal_conv1d
from hf_packfree.packing import PackedSequence


class PackedShortConv(ConvMixer):
    """Put in front of a family's short convolution: C * conv(B * x), with B, C and x projected from
    each token. The window of the convolution stops at every document's edge.
    """

    endings = ("ShortConv",)
    follows_trees = True
    conv_name = "conv"

    def _mix(self, x: Tensor, packed: PackedSequence) -> Tensor:
        before, after, x = self.in_proj(x).chunk(3, -1)
        mixed: Tensor = self.out_proj(after * self._convolve(before * x, packed))
        return mixed

    def _convolve(self, x: Tensor, packed: PackedSequence) -> Tensor:
        weight, bias = self.conv.weight.squeeze(1), self.conv.bias
        backend = state_of(self).kernels_for(x.device, x.dtype)["conv"]
        return causal_conv1d(x, weight, packed, bias=bias, activation=None, backend=backend)

    @staticmethod
    def op_sizes(mixer: Any) -> dict[str, int]:
        """Return the convolution's width and channels."""
        return {"taps": mixer.conv.kernel_size[0], "channels": mixer.conv.in_channels}

    @staticmethod
    def checkpoint_sizes(mixer: Any) -> Sizes:
        """Return the sizes of the parameters, as found and as the module's config says."""
        size, conv = mixer.config.hidden_size, mixer.conv
        return {
            "conv": (type(conv), nn.Conv1d),
            "conv.weight": (size_of(conv.weight), (size, 1, mixer.config.conv_L_cache)),
            "in_proj": (size_of_linear(mixer.in_proj), (3 * size, size)),
            "out_proj": (size_of_linear(mixer.out_proj), (size, size)),
        }
