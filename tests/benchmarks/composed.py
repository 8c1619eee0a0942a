"""What was the fastest before this package: upstream's model with kernels of other libraries put
in, for packed rows only.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
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
    groups heads by itself; layers with sinks by upstream's flex attention.
    """
    from torch.nn.attention.varlen import varlen_attn

    if words.get("s_aux") is not None:
        return _by_flex_attention(module, query, key, value, scaling, **words)

    # under autocast the rotary embedding leaves fp32, and weights in 4 bits do between norms in
    # fp32, which upstream's flash attention rounds, too
    dtype = value.dtype
    if dtype == torch.float32 and torch.is_autocast_enabled(value.device.type):
        dtype = torch.get_autocast_dtype(value.device.type)
    q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
    ends, longest = words["cu_seq_lens_q"], words["max_length_q"]
    # flash attention has one size for keys and values
    size, wider = v.shape[-1], q.shape[-1] - v.shape[-1]
    v = nn.functional.pad(v, (0, wider)) if wider else v
    out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0))
    return out[None, ..., :size], None


def _by_flex_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    *,
    cu_seq_lens_q: Tensor,
    sliding_window: int | None,
    s_aux: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    from transformers.integrations.flex_attention import flex_attention_forward

    mask = _block_mask(cu_seq_lens_q, sliding_window, query.shape[2])
    out, _lse = flex_attention_forward(
        module, query, key, value, mask, scaling=scaling, s_aux=s_aux.to(value.dtype)
    )
    return out, None


# for layers with a window and those without
@lru_cache(maxsize=2)
def _block_mask(ends: Tensor, window: int | None, tokens: int) -> Any:
    """Return the mask of `flex_attention` for a packed row; made once for the same offsets."""
    from torch.nn.attention.flex_attention import create_block_mask

    documents = torch.repeat_interleave(
        torch.arange(len(ends) - 1, device=ends.device), ends.diff().long(), output_size=tokens
    )

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found: Tensor = (query >= key) & (documents[query] == documents[key])
        return found if window is None else found & (query - key < window)

    return create_block_mask(sees, None, None, tokens, tokens, device=ends.device)


def put_mixers_in(upstream: Any) -> None:
    """Put kernels that read boundaries into upstream's module: mamba-ssm's Triton scan, which
    needs none of what that package compiles, or FLA's Kimi Delta Attention.
    """
    if hasattr(upstream, "mamba2_chunk_scan"):
        from hf_packfree.ops.ssd.mamba_ssm import _kernel

        upstream.mamba2_chunk_scan = _given(inspect.unwrap(_kernel()), seq_idx="seq_idx")
        # one call for convolution, scan, norm and projection, which causal-conv1d has to be there for
        upstream.mamba2_split_conv1d_scan_combined = lambda *_, **__: None
    if hasattr(upstream, "chunk_kimi_delta_attention"):
        from fla.ops.kda import chunk_kda

        upstream.chunk_kimi_delta_attention = _given(chunk_kda, cu_seqlens="cu_seq_lens_q")


def _given(kernel: Any, **boundaries: str) -> Any:
    """Return the kernel behind a layer's call, which hands on every keyword of the batch.

    Args:
        boundaries: {the kernel's word: the collator's}.
    """
    known = inspect.signature(kernel).parameters

    def run(*tensors: Tensor, **words: Any) -> Any:
        words |= {name: words.get(word) for name, word in boundaries.items()}
        return kernel(*tensors, **{name: word for name, word in words.items() if name in known})

    return run
