"""Padding of a row to fixed sizes, so that its tensors and plans have the same shapes as those of
other rows (CUDA graphs).
"""

from __future__ import annotations

import numpy as np
import torch

from hf_packfree.packing.opaque import replaced
from hf_packfree.packing.record import PackedSequence, group_numbers


def on_host(packed: PackedSequence) -> PackedSequence:
    """Return the record of the packed row with all tensors on the host, without waiting for the
    device; plans made from it launch no kernels.
    """
    _, numbers = group_numbers(np.diff(packed.cu_seqlens_cpu.numpy()))
    return replaced(
        packed,
        cu_seqlens=packed.cu_seqlens_cpu,
        seq_idx=torch.from_numpy(numbers)[None],
        batch_shape=(1, len(numbers)),
        indices=None,
        _memo={},
    )


def filled(packed: PackedSequence, tokens: int, documents: int, longest: int) -> PackedSequence:
    """Return the record padded to `tokens` and `documents`: by segments of padding tokens, of
    `longest` tokens but for the last, then by empty segments.

    Plans of the result have the fixed sizes of `chunk_plan` for bounded records.

    Args:
        packed: of a row of no more tokens.
        tokens, documents: T and N of the result; N is at least that of the row's documents, those
            of padding, and an empty one.
        longest: `max_seqlen` of the result.
    """
    device, spare = packed.seq_idx.device, tokens - packed.num_tokens
    ends = torch.arange(1, documents - packed.num_segments + 1, dtype=torch.int32, device="cpu")
    ends = (packed.num_tokens + ends * longest).clamp_(max=tokens)
    assert ends[-1] == tokens, "found too few documents for the padding"
    offsets = torch.cat([packed.cu_seqlens_cpu, ends])
    seq_idx = packed.seq_idx
    if spare:
        of_padding = torch.arange(spare, dtype=seq_idx.dtype, device=device) // longest
        seq_idx = torch.cat([seq_idx, packed.num_segments + of_padding[None]], 1)
    return replaced(
        packed,
        cu_seqlens=offsets.to(device, non_blocking=True),
        cu_seqlens_cpu=offsets,
        seq_idx=seq_idx,
        max_seqlen=longest,
        batch_shape=(1, tokens),
        indices=None,
        padding_segments=(),
        plain=False,
        bounded=True,
        _memo={},
    )
