"""Mamba-2's SSD with the signatures and the checks of mamba-ssm 2.3.2, in torch on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"]


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor:
    """Every output as the sum over the tokens of its seq_idx [B, T] in front of it, in fp64.

    The real kernels compare the numbers of neighbours alone: of tokens further apart, too, they
    have to differ here.
    """
    wanted = (z, dt_bias, initial_states, cu_seqlens)
    if any(one is not None for one in wanted) or dt_softplus or dt_limit != (0.0, float("inf")):
        raise NotImplementedError("the stand-in takes steps as they are, and keeps no states")
    if return_final_states or return_varlen_states or D is None or seq_idx is None:
        raise NotImplementedError("the stand-in returns packed outputs alone, and takes D")
    batch, tokens, heads, _ = x.shape
    groups, state = B.shape[2:]
    assert heads % groups == 0
    assert B.shape == (batch, tokens, groups, state) and C.shape == B.shape
    assert dt.shape == (batch, tokens, heads)
    assert A.shape == (heads,) and D.shape == (heads,)
    assert seq_idx.shape == (batch, tokens) and seq_idx.dtype == torch.int32
    assert isinstance(chunk_size, int)
    write, read = (y.double().repeat_interleave(heads // groups, 2).transpose(1, 2) for y in (B, C))
    total = (dt.double() * A.double()).cumsum(1).transpose(1, 2)[..., None]
    past = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    seen = past & (seq_idx[:, None, :, None] == seq_idx[:, None, None])
    between = (total - total.mT).masked_fill(~seen, -torch.inf).exp()
    values = (dt.double()[..., None] * x.double()).transpose(1, 2)
    out = ((read @ write.mT * between) @ values).transpose(1, 2)
    return (out + D.double()[:, None] * x.double()).to(x.dtype)


def mamba_split_conv1d_scan_combined(*args: Any, **kwargs: Any) -> Tensor:
    """Convolution, scan, norm and projection in one, which runs no adapters: nothing of a packed row
    may come here.
    """
    raise AssertionError("a packed row reached mamba_split_conv1d_scan_combined")
