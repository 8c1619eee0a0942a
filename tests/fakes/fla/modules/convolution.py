"""The short convolution over packed rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fla.ops.utils.index import check_chunk_indices, spans_of


def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Convolve x [B, T, D] with weight [D, W] within documents; states are [N, D, W].

    Tokens outside every document come out as NaN: the kernel never writes them.
    """
    if backend not in ("triton", "mix", "cuda"):
        raise ValueError(f"Unsupported backend: {backend}")
    if cp_context is not None:
        raise NotImplementedError("the stand-in has no context parallelism")
    assert weight is not None and weight.shape[0] == x.shape[-1], "weight is [D, W]"
    assert activation in (None, "silu", "swish"), f"activation {activation!r}"
    check_chunk_indices(chunk_indices, cu_seqlens, cu_seqlens_cpu)
    spans, width = spans_of(x, cu_seqlens, initial_state), weight.shape[1]
    out, finals = torch.full_like(x, float("nan"), memory_format=torch.contiguous_format), []
    for number, (row, start, stop) in enumerate(spans):
        before = (
            x.new_zeros(width, x.shape[-1]) if initial_state is None else initial_state[number].T
        )
        window = torch.cat([before, x[row, start:stop]]).T.float()
        y = F.conv1d(
            window[None],
            weight.float()[:, None],
            None if bias is None else bias.float(),
            groups=len(weight),
        )
        # the state holds W inputs, one more than a window that ends before the document
        y = y[0, :, 1:].T
        out[row, start:stop] = (y if activation is None else F.silu(y)).to(x.dtype)
        finals.append(window[:, -width:].to(x.dtype))
    out = out if residual is None else out + residual
    return out, torch.stack(finals) if output_final_state else None
