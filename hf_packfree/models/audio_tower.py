"""Audio towers whose features of an audio do not depend on the other audios of the call.

Upstream cuts audios into chunks of `2 * n_window` frames and pads all chunks to the longest one of
the call before its convolutions. Each convolution turns the padding into values that the next one
reads, so the features of an audio shorter than a chunk change if a longer audio is in the call.
Here, before each convolution, values beyond the width that a chunk has alone are set to zero.
Upstream's layers run once for all audios, so that ranks with different audios call the layers
equally often.

Before transformers 5.9 upstream's sdpa and eager attention ignored windows: audios attended to each
other, and long audios beyond their windows. Here attention stops at windows in every release, as
flash attention and later releases do.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from hf_packfree.models import compat
from hf_packfree.models.base import Replacement
from hf_packfree.models.state import state_of
from hf_packfree.models.vision_attention import segments_of
from hf_packfree.ops.attention.towers import tower_attention


class PackedAudioTower(Replacement):
    """Put in front of a family's audio tower."""

    endings = ("AudioEncoder",)

    def forward(
        self,
        input_features: Tensor | None = None,
        feature_lens: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run upstream's forward, with short audios padded as if each were alone in the call.

        Args:
            input_features: [mel bins, frames], the audios one after the other.
            feature_lens: integers [audios], the number of frames of each audio.
        """
        arguments = {"input_features": input_features, "feature_lens": feature_lens, **kwargs}
        widths = (
            [] if feature_lens is None else chunk_widths(feature_lens.tolist(), 2 * self.n_window)
        )
        if len(set(widths)) <= 1:
            return super().forward(**arguments)
        with ExitStack() as hooks:
            width = torch.tensor(widths, device=feature_lens.device)  # type: ignore[union-attr]
            for conv in (self.conv2d2, self.conv2d3):
                # all convolutions have stride 2
                width = (width - 1) // 2 + 1
                hooks.enter_context(conv.register_forward_pre_hook(_Cut(width)))
            return super().forward(**arguments)


def chunk_widths(lengths: list[int], chunk: int) -> list[int]:
    """Return the number of frames of each chunk of the audios, in order, with the padding that it
    gets if its audio is alone in the call.
    """
    return [min(length, chunk) for length in lengths for _ in range(-(-length // chunk))]


class _Cut:
    """A forward pre-hook of a convolution that sets chunks to zero beyond their widths. One call of
    the tower may call the convolution several times, each with the next chunks.
    """

    def __init__(self, widths: Tensor) -> None:
        self._widths, self._seen = widths, 0

    def __call__(self, conv: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        """Cut the next n chunks of the tower's call, [n, channels, mel bins, width]."""
        (x,) = inputs
        widths = self._widths[self._seen : self._seen + len(x)].to(x.device)
        self._seen += len(x)
        beyond = torch.arange(x.shape[-1], device=x.device) >= widths[:, None]
        return (x.masked_fill(beyond[:, None, None], 0),)


class PackedAudioAttention(Replacement):
    """Put in front of an audio tower's attention: our operation where the model runs sdpa, and
    eager attention in releases that ignore windows. The projection modules are called.
    """

    endings = ("AudioAttention",)

    def forward(self, hidden_states: Tensor, cu_seqlens: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the attention's output [T, H * D] for audios [T, H * D], each token attending
        within its window.

        Args:
            cu_seqlens: int32 [N+1], the offsets of windows in tokens.
        """
        loaded = self.config._attn_implementation
        if "flash" in loaded or (loaded == "eager" and not compat.AUDIO_IGNORES_WINDOWS):
            return super().forward(hidden_states, cu_seqlens, *args, **kwargs)
        heads = (1, len(hidden_states), self.num_heads, -1)
        q, k, v = (
            project(hidden_states).view(heads)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        backend = state_of(self).kernels_for(q.device, q.dtype)["tower_attention"]
        out = tower_attention(q, k, v, segments_of(cu_seqlens), scale=self.scaling, backend=backend)
        return self.out_proj(out.flatten(2).squeeze(0))

    @staticmethod
    def op_sizes(layer: Any) -> dict[str, int]:
        """Return the size of a head."""
        return {"tower_head_size": layer.head_dim}
