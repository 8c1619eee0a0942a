"""Long documents in cuDNN's attention, one call of torch's `scaled_dot_product_attention` for each;
shorter ones in our Triton kernels.

On Hopper cuDNN runs heads of 256 channels faster than our kernels do, once a document is long
enough for a call of its own. Its gradients of queries may be summed in another order from call to
call, which is no choice for batch invariance.

Shapes: T tokens of the row, H query heads, HK key heads, D head size.
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_packfree.ops.attention import triton_native
from hf_packfree.packing import PackedSequence, uncompiled

LONG = 8192
"""Tokens of a document that gets a call of its own."""
Piece = tuple[int, PackedSequence | None]
"""Number of tokens, and the record of the documents they make up; None: one long document."""


@uncompiled
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedSequence,
    *,
    scale: float | None = None,
    long: int = LONG,
) -> Tensor:
    """See `hf_packfree.ops.attention.attention`; documents of `long` tokens and more run in
    cuDNN.
    """
    # other rows use the plan of a bounded row, and their documents have other lengths
    if packed.bounded or packed.max_seqlen < long or not _usable(q, k, v):
        return triton_native.attend(q, k, v, packed, scale=scale)
    pieces: list[Piece] = packed.cached(plan_pieces, long)
    if len(pieces) == 1:
        return _attend_document(q, k, v, scale)
    sizes = [size for size, _ in pieces]
    outputs = []
    for (_, record), qs, ks, vs in zip(
        pieces, *(x.split(sizes, 1) for x in (q, k, v)), strict=True
    ):
        if record is None:
            outputs.append(_attend_document(qs, ks, vs, scale))
        else:
            outputs.append(triton_native.attend(qs, ks, vs, record, scale=scale))
    return torch.cat(outputs, 1)


def plan_pieces(packed: PackedSequence, long: int) -> list[Piece]:
    """Cut the row into pieces: each document of `long` tokens and more, and the documents between
    two of these.
    """
    device, pieces = packed.cu_seqlens.device, list[Piece]()
    for is_long, lengths in groupby(packed.lengths, lambda length: length >= long):
        if is_long:
            pieces += [(length, None) for length in lengths]
        else:
            record = PackedSequence.from_lengths(list(lengths), device=device)
            pieces.append((record.num_tokens, record))
    return pieces


def _attend_document(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=True
        ).transpose(1, 2)


def _usable(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether cuDNN has kernels for heads of these sizes on their device."""
    if not _runs_on(q.device):
        return False
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, True)
    return torch.backends.cuda.can_use_cudnn_attention(params)


def takes(head_size: int, device: torch.device) -> bool:
    """Return whether cuDNN has kernels for heads of that size on a device."""
    one = torch.empty(1, LONG, 1, head_size, dtype=torch.bfloat16, device=device)
    return _usable(one, one, one)


def _runs_on(device: torch.device) -> bool:
    """Whether torch may call cuDNN's attention on a device, and deterministic algorithms are not
    asked for.
    """
    wanted = (
        torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
    )
    return device.type == "cuda" and wanted
