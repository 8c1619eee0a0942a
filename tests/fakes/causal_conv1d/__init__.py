"""Stand-in for causal-conv1d 1.7.0: its signatures and the checks of its CUDA code, in torch on
the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__version__ = "1.7.0"
__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Convolve x [B, D, T] with weight [D, W]; a tap of another seq_idx [B, T] counts as zero,
    seq_idx below 0 gives 0.
    """
    if return_final_states or final_states_out is not None or initial_states is not None:
        raise NotImplementedError("the stand-in keeps no states")
    _check(x, weight, bias, activation)
    width, tokens = weight.shape[1], x.shape[2]
    if seq_idx is not None:
        _check_documents(x, seq_idx)
    documents = torch.zeros_like(x[:, 0], dtype=torch.int32) if seq_idx is None else seq_idx
    taps = F.pad(x.float(), (width - 1, 0)).unfold(2, width, 1)
    same = F.pad(documents, (width - 1, 0), value=-1).unfold(1, width, 1) == documents[..., None]
    out = (taps * same[:, None] * weight.float()[None, :, None]).sum(-1)
    out = out if bias is None else out + bias.float()[:, None]
    out = out if activation is None else F.silu(out)
    assert out.shape[2] == tokens
    # laid out as x is
    return torch.zeros_like(x).copy_(out * (documents >= 0)[:, None])


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Convolve the next tokens x [B, D] or [B, D, T]; conv_state [B, D, at least W - 1] is
    brought up to date in place.
    """
    if cache_seqlens is not None or conv_state_indices is not None:
        raise NotImplementedError("the stand-in has plain states")
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError("activation must be None, silu, or swish")
    tokens = x[..., None] if x.ndim == 2 else x
    window = torch.cat([conv_state, tokens], -1)
    with torch.no_grad():
        conv_state.copy_(window[..., -conv_state.shape[-1] :])
    out = F.conv1d(
        window.float(),
        weight.float()[:, None],
        None if bias is None else bias.float(),
        groups=len(weight),
    )
    out = out[..., -tokens.shape[-1] :]
    return (out if activation is None else F.silu(out)).to(x.dtype).reshape(x.shape)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError("activation must be None, silu, or swish")
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    if x.dtype not in kinds or weight.dtype not in kinds:
        raise RuntimeError(f"x is {x.dtype} and weight {weight.dtype}: wanted fp32, fp16 or bf16")
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[1]:
        raise RuntimeError(
            f"x {tuple(x.shape)} is not [B, D, T] of weight {tuple(weight.shape)} [D, W]"
        )
    if not 2 <= weight.shape[1] <= 4:
        raise RuntimeError(f"width {weight.shape[1]}: wanted 2 to 4")
    if _channels_last(x) and (x.shape[1] % 8 or x.stride(0) % 8 or x.stride(2) % 8):
        raise RuntimeError(
            f"channel-last x of strides {x.stride()} and {x.shape[1]} channels: wanted multiples "
            f"of 8"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise RuntimeError(f"bias {tuple(bias.shape)}: wanted {tuple(weight.shape[:1])}")


def _check_documents(x: Tensor, seq_idx: Tensor) -> None:
    if not _channels_last(x):
        raise RuntimeError(f"seq_idx with x of strides {x.stride()}: wanted channel-last")
    if seq_idx.dtype != torch.int32 or tuple(seq_idx.shape) != (x.shape[0], x.shape[2]):
        raise RuntimeError(
            f"seq_idx {seq_idx.dtype} {tuple(seq_idx.shape)}: wanted int32 "
            f"{(x.shape[0], x.shape[2])}"
        )


def _channels_last(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(2) > 1
