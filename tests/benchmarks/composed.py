"""What was the fastest before this package: upstream's model with kernels of other libraries put
in, for packed rows only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NAME = "composed"


def compose(model: nn.Module) -> None:
    """Put torch's varlen attention and FLA's gated norm into an unpatched model; conv and Liger
    are `Variant`'s to put in.
    """
    from fla.modules import FusedRMSNormGated
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    config: Any = model.config
    config._attn_implementation = NAME
    for module in model.modules():
        mixer: Any = getattr(module, "linear_attn", None)
        if mixer is not None:
            weight, eps = mixer.norm.weight, mixer.norm.variance_epsilon
            norm = FusedRMSNormGated(
                len(weight), eps=eps, activation="silu", device=weight.device, dtype=weight.dtype
            )
            with torch.no_grad():
                norm.weight.copy_(weight)
            mixer.norm = norm


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **words: Any,
) -> tuple[Tensor, None]:
    """Attend within `cu_seq_lens_q`; q, k, v are [1, heads, T, D]. As torch 2.11 has it, which
    groups heads by itself.
    """
    from torch.nn.attention.varlen import varlen_attn

    # under autocast the rotary embedding leaves fp32, which upstream's flash attention rounds, too
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    ends, longest = words["cu_seq_lens_q"], words["max_length_q"]
    out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0))
    return out[None], None
