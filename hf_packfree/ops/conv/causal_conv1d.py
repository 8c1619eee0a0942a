"""Dao's causal-conv1d kernel, with seq_idx."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from hf_packfree.ops.backend import Target, broken, dtype_name, installed, needs_cuda, too_old
from hf_packfree.packing import PackedSequence, uncompiled

_OLDEST = (7, 5)
"""The oldest compute capability that the package's setup.py compiles for."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDTH = 8
"""The kernel reads channels in groups of this many where it is given `seq_idx`."""


def unusable(target: Target) -> str | None:
    """Return why causal-conv1d cannot run at `target`, or None."""
    if (reason := needs_cuda(target) or _unfit(target)) is not None:
        return reason
    if find_spec("causal_conv1d") is None:
        return "causal-conv1d is not installed; pip install causal-conv1d, which compiles it"
    why = "to be deterministic under torch.use_deterministic_algorithms"
    old = too_old("causal-conv1d", installed("causal-conv1d"), why)
    return old or broken("causal-conv1d", "causal_conv1d")


def _unfit(target: Target) -> str | None:
    """Return what of the target's GPU, dtype or model causal-conv1d does not support, or None."""
    if target.capability is not None and target.capability < _OLDEST:
        return f"it is compiled for Turing GPUs and later (7.5), this is {target.gpu}"
    if target.dtype not in _DTYPES:
        return f"it runs in bfloat16, float16 and float32, this is {dtype_name(target.dtype)}"
    if not 2 <= target.sizes.get("taps", 4) <= 4:
        return f"it has 2 to 4 taps, the model {target.sizes['taps']}"
    if (channels := _channels(target.sizes)) % _WIDTH:
        return f"it takes channels in multiples of {_WIDTH}, the model has {channels}"
    return None


def _channels(sizes: dict[str, int]) -> int:
    """Return the number of channels of a model's convolutions, by default those of q, k and v side
    by side; 0 where unknown.
    """
    if "channels" in sizes:
        return sizes["channels"]
    keys, values = (
        sizes.get(f"{part}_heads", 0) * sizes.get(f"{part}_size", 0) for part in ("key", "value")
    )
    return 2 * keys + values if keys and values else 0


@uncompiled
def causal_conv1d(
    x: Tensor, weight: Tensor, packed: PackedSequence, bias: Tensor | None, silu: bool
) -> Tensor:
    """See `hf_packfree.ops.conv.causal_conv1d`.

    The kernel wants [B, C, T] with channels last, C and the token stride multiples of 8. The
    transposed view of a row usually is that; otherwise it is copied.
    """
    from causal_conv1d import causal_conv1d_fn

    if x.stride(2) != 1 or x.stride(1) % 8 or x.storage_offset() % 8:
        x = x.contiguous()
    activation = "silu" if silu else None
    out: Tensor = causal_conv1d_fn(
        x.mT, weight, bias, seq_idx=packed.seq_idx, activation=activation
    )
    return out.mT
