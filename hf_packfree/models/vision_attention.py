"""Vision towers: one attention call per layer for all images of a packed row; the lengths of images
are read on the host once per forward.

Upstream's own attention is exact too, but calls image by image and synchronises with the device in
every block. Batches that upstream runs keep upstream's attention, so that unpacked rows with images
stay equal to upstream's bit for bit.

Shapes: P patches of all images and frames, H heads, D head size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from hf_packfree.models import compat
from hf_packfree.models.base import Replacement
from hf_packfree.models.plain_layers import dtype_read, layer_norm_weights, patch_weights
from hf_packfree.models.state import state_of
from hf_packfree.ops.attention.towers import tower_attention
from hf_packfree.ops.fused import add_layer_norm, qkv_rope
from hf_packfree.packing import PackedSequence, uncompiled
from hf_packfree.packing.marks import ON_HOST, PACKED, SEGMENTS


def mark_packed(x: Tensor) -> Tensor:
    """Return a view with a mark that the batch is packed, by which the vision tower, for grids
    [images, 3], or its patch embedding, for patches, runs the patched layers.
    """
    return PACKED.on_view(x, True)


@uncompiled
def segments_of(cu_seqlens: Tensor) -> PackedSequence:
    """Return the record of the segments within which a tower attends, built once for each tensor of
    offsets, which is read on the host.

    Args:
        cu_seqlens: integers [N+1], 0 first; all blocks get the same tensor, also when they are
            recomputed.
    """
    found = SEGMENTS.of(cu_seqlens)
    if found is None:
        on_host = ON_HOST.of(cu_seqlens)
        lengths = (cu_seqlens if on_host is None else on_host).diff().cpu()
        found = PackedSequence.from_lengths(lengths[lengths > 0], device=cu_seqlens.device)
        SEGMENTS.put(cu_seqlens, found)
    return found


@uncompiled
def _made_on_host(grid: Tensor, merge: int, device: torch.device) -> dict[str, Tensor]:
    """Return keywords of upstream's tower, which would otherwise compute their values image by
    image on the device, with a synchronisation each.

    Args:
        grid: see `PackedVisionTower.forward`.
        merge: how many patches along each side become one token.
        device: the tower's device.

    Returns:
        position_ids: int64 [P, 2], row and column of each patch, computed once for all images of
            one size.
        cu_seqlens: int32 [N+1], the offsets of images and frames, which `segments_of` reads on the
            host.
    """
    if compat.TOWERS_MAKE_POSITIONS:
        return {}
    from transformers.vision_utils import get_vision_position_ids

    grid = grid.detach().to("cpu")
    sizes, image_size = grid.unique(dim=0, return_inverse=True)
    of_size = [get_vision_position_ids(size[None], merge) for size in sizes]
    positions = torch.cat([of_size[size] for size in image_size.tolist()])
    frames, height, width = grid.numpy().T
    on_host = torch.from_numpy(
        np.append(0, np.repeat(height * width, frames).cumsum()).astype(np.int32)
    )
    offsets = on_host.to(device)
    ON_HOST.put(offsets, on_host)
    return {"position_ids": positions.to(device), "cu_seqlens": offsets}


class PackedVisionTower(Replacement):
    """Put in front of a family's vision tower: tells its blocks whether the batch is packed."""

    endings = "VisionModel", "VisionEncoder", "VisionTransformerPretrainedModel"

    def forward(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any) -> Any:
        """Run upstream's forward.

        Args:
            hidden_states: patches [P, channels].
            grid_thw: integers [images, 3], the number of frames, rows of patches and columns of
                patches of each image or video. They are read on the host; for a packed batch, pass
                them there.
        """
        packed = kwargs["packed_sequence"] = (
            PACKED.of(grid_thw) is True or state_of(self).runs_unpacked
        )
        if packed:
            kwargs |= _made_on_host(grid_thw, self.spatial_merge_size, hidden_states.device)
            grid_thw, hidden_states = grid_thw.to(hidden_states.device), mark_packed(hidden_states)
        return super().forward(hidden_states, grid_thw=grid_thw, **kwargs)


class PackedPatchEmbedding(Replacement):
    """Put in front of a vision tower's patch embedding: a convolution whose windows do not overlap
    is one matrix product.
    """

    endings = ("VisionPatchEmbed",)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return embeddings [P, D] of patches [P, channels of all their pixels]."""
        parts = patch_weights(self.proj, hidden_states) if PACKED.of(hidden_states) else None
        if parts is None:
            return super().forward(hidden_states)
        weight, bias = parts
        return linear(hidden_states.to(weight.dtype), weight, bias)


class PackedVisionBlock(Replacement):
    """Put in front of a vision tower's block (norm, attention, norm, MLP, with a residual around
    each pair).

    For families whose norms are layer norms: each norm and the residual sum before it are one
    kernel.
    """

    endings = ("VisionBlock",)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the block's output [P, D] for hidden states [P, D]: by upstream's forward, or with
        fused norms for packed batches.
        """
        x = hidden_states
        backend = (
            state_of(self).kernels_for(x.device, x.dtype)["fused"]
            if kwargs.get("packed_sequence")
            else "torch"
        )
        readers = self.attn.qkv, getattr(self.mlp, "linear_fc1", None)
        first, second = (
            None if backend == "torch" else layer_norm_weights(norm, reader, x)
            for norm, reader in zip((self.norm1, self.norm2), readers, strict=True)
        )
        if first is None or second is None:
            return super().forward(x, *args, **kwargs)
        options: Any = {"dtype": dtype_read(x, readers), "backend": backend}
        normed, x = add_layer_norm(x, None, *first, self.norm1.eps, **options)
        mixed = self.attn(normed, *args, **kwargs)
        normed, x = add_layer_norm(x, mixed, *second, self.norm2.eps, **options)
        return x + self.mlp(normed)


class PackedVisionAttention(Replacement):
    """Put in front of a vision tower's attention: our operation for packed batches if the model
    runs sdpa, otherwise upstream's forward.

    The projection modules are called, so that their adapters run.
    """

    endings = ("VisionAttention",)

    def forward(self, hidden_states: Tensor, cu_seqlens: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the attention's output [P, H * D] for patches [P, H * D], each attending within
        its segment.

        Args:
            cu_seqlens: int32 [N+1], the offsets of images, frames or windows.
        """
        packed = kwargs.pop("packed_sequence", False)
        if not packed or self.config._attn_implementation != "sdpa":
            return super().forward(hidden_states, cu_seqlens, *args, **kwargs)
        qkv = self.qkv(hidden_states).view(len(hidden_states), 3, self.num_heads, -1)
        kernels = state_of(self).kernels_for(qkv.device, qkv.dtype)
        cos, sin = kwargs["position_embeddings"]
        q, k, v = self._split(qkv, cos, sin, kernels["fused"])
        segments, backend = segments_of(cu_seqlens), kernels["tower_attention"]
        out = tower_attention(
            q[None], k[None], v[None], segments, scale=self.scaling, backend=backend
        )
        return self.proj(out.flatten(2).squeeze(0))

    def _split(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, backend: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        if backend != "torch":
            return qkv_rope(qkv, cos, sin, backend=backend)
        q, k, v = qkv.unbind(1)
        q, k = self._rotate(q, k, cos, sin)
        return q, k, v

    def _rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the tower's rotary embedding to q and k [P, H, D]."""
        rotated: tuple[Tensor, Tensor] = self.upstream.apply_rotary_pos_emb_vision(q, k, cos, sin)
        return rotated

    @staticmethod
    def op_sizes(layer: Any) -> dict[str, int]:
        """Return the size of a head."""
        return {"tower_head_size": layer.qkv.in_features // layer.num_heads}


VISION_MIXINS = (
    PackedVisionTower,
    PackedPatchEmbedding,
    PackedVisionBlock,
    PackedVisionAttention,
)
