"""torch's own flash attention over cu_seqlens (`torch.nn.attention.varlen`, torch 2.10 and later),
which needs no package.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from inspect import signature
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_packfree.ops.attention.torch_native import of_one_size
from hf_packfree.ops.backend import Target, before_ampere, needs_cuda, needs_half, refuse_wide
from hf_packfree.packing import PackedSequence, uncompiled, with_history
from hf_packfree.versions import (
    VARLEN_GROUPS_HEADS,
    VARLEN_HAS_WINDOWS,
    VARLEN_HEEDS_SDPA_KERNEL,
    VARLEN_MAY_BE_CUDNN,
)

_HEAD_SIZE = 256
KERNEL = "FlashAttention"
"""The kernel that runs, of those that torch may choose from."""


def unusable(target: Target) -> str | None:
    """Return why torch's varlen attention cannot run at `target`, or None."""
    if (reason := needs_cuda(target) or before_ampere(target) or needs_half(target)) is not None:
        return reason
    sizes = target.sizes.get("head_size", 0), target.sizes.get("other_value_size", 0)
    if (size := max(sizes)) > _HEAD_SIZE or size % 8:
        return (
            f"it takes heads of up to {_HEAD_SIZE} channels, a multiple of 8; the model has {size}"
        )
    if target.sizes.get("window") and "window_size" not in _parameters():
        return f"it takes a window from torch {VARLEN_HAS_WINDOWS} on, this is {torch.__version__}"
    return None


@uncompiled
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedSequence,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    of_keys: PackedSequence | None = None,
) -> Tensor:
    """See `hf_packfree.ops.attention.attention`; `of_keys` is the record of k and v where documents
    have more keys than queries, which are then those of their last tokens. Where keys and values
    differ in size, the narrower are padded with channels of zero.
    """
    refuse_wide("varlen", q, k, v)
    from torch.nn.attention.varlen import varlen_attn

    scale, size = q.shape[3] ** -0.5 if scale is None else scale, v.shape[3]
    q, k, v = of_one_size(q, k, v)
    if q.shape[2] != k.shape[2] and not _groups_heads():
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    options = _options(causal)
    if not causal and _may_be_cudnn():
        # a window as wide as the longest document masks nothing, but keeps torch from cuDNN, which
        # takes no windows
        options = options | {"window_size": (packed.max_seqlen, packed.max_seqlen)}
    if window is not None:
        # torch counts the keys before a query, without the query's own
        options = options | {"window_size": (window - 1, 0)}
    if "scale" in _parameters():
        options = {**options, "scale": scale}
    elif scale != q.shape[3] ** -0.5:
        # torch 2.10 always scales by D ** -0.5
        q = q * (scale * q.shape[3] ** 0.5)
    keys = packed if of_keys is None else of_keys
    bounds, longest = (packed.cu_seqlens, keys.cu_seqlens), (packed.max_seqlen, keys.max_seqlen)
    # not x[0]: the backward pass of an index fills and copies a whole gradient
    q, k, v = (x.squeeze(0) for x in (q, k, v))
    with _flash_attention():
        out: Any = varlen_attn(q, k, v, *bounds, *longest, **options)
    return out[None, ..., :size]  # type: ignore[no-any-return]


def attend_with_history(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedSequence, *, scale: float | None = None
) -> Tensor:
    """See `AttentionBackend.with_history`."""
    longer = packed.cached(with_history, k.shape[1] - q.shape[1])
    return attend(q, k, v, packed, scale=scale, of_keys=longer)


def _flash_attention() -> AbstractContextManager[Any]:
    """Ask for FlashAttention: torch 2.15 would rather take cuDNN, which plans anew for every shape
    of a packed row.
    """
    if Version(torch.__version__) < Version(VARLEN_HEEDS_SDPA_KERNEL):
        return nullcontext()
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)


def _may_be_cudnn() -> bool:
    """Whether torch may take cuDNN and cannot be told not to: 2.14 alone."""
    release = Version(torch.__version__)
    return Version(VARLEN_MAY_BE_CUDNN) <= release < Version(VARLEN_HEEDS_SDPA_KERNEL)


@cache
def _parameters() -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return signature(varlen_attn).parameters


def _groups_heads() -> bool:
    """Whether torch's function takes fewer key heads than query heads: 2.13 has a parameter for
    that, 2.11 needs none.
    """
    return "enable_gqa" in _parameters() or Version(torch.__version__) >= Version(
        VARLEN_GROUPS_HEADS
    )


@cache
def _options(causal: bool) -> dict[str, Any]:
    """The keywords of `varlen_attn` for causal attention, `is_causal` in torch 2.10 and a window
    open to the left later, and for grouped heads.
    """
    known = _parameters()
    grouped = {"enable_gqa": True} if "enable_gqa" in known else {}
    # attention in both directions is torch's default
    if not causal:
        return grouped
    return grouped | ({"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)})
