"""Attention of vision and audio towers: every token of a segment reads every other, earlier or
later.

A segment is what a tower attends within: an image, a frame of a video, a window of an audio.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from hf_packfree.ops.attention import torch_native, varlen
from hf_packfree.ops.backend import Backend, Target
from hf_packfree.ops.op import Op
from hf_packfree.packing import PackedSequence


def _varlen_unusable(target: Target) -> str | None:
    """Return why "varlen" cannot run a tower's attention at `target`, by `tower_head_size`, or
    None.
    """
    return varlen.unusable(
        replace(target, sizes={"head_size": target.sizes.get("tower_head_size", 0)})
    )


OP = Op(
    name="tower_attention",
    backends={
        "varlen": Backend(
            partial(varlen.attend, causal=False),
            _varlen_unusable,
            kernel=varlen.KERNEL,
            batch_invariant=True,
        ),
        "torch": Backend(partial(torch_native.attend, causal=False)),
    },
    where="towers",
    loaded=True,
)
"""Our own Triton kernels are causal, and so are not among the backends."""


def tower_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: PackedSequence,
    *,
    scale: float | None = None,
    backend: str = "torch",
) -> Tensor:
    """Attend within each segment, in both directions.

    Args:
        q, k, v: [1, T, H, D], any floating dtype, any strides whose last is 1.
        segments: of the T tokens.
        scale: factor on q.k before the softmax; D ** -0.5 if not given.
        backend: a name in `OP.backends`.

    Returns:
        [1, T, H, D] in q's dtype. "torch" makes one call for every run of neighbouring segments of
        one length, "varlen" one call for all.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    attend = OP.running(backend, segments)
    return attend(q, k, v, segments, scale=scale)  # type: ignore[no-any-return]
