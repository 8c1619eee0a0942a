"""What the attention kernels refuse; that they are exact is in test_kernels.py and, on GPUs, in tests/gpu."""

from __future__ import annotations

import pytest
import torch

from hf_packfree.errors import BackendUnavailable
from hf_packfree.ops.attention import attention
from hf_packfree.ops.attention.triton_native import plan_blocks
from hf_packfree.packing import PackedSequence


def test_documents_beyond_32_bits_are_refused():
    packed = PackedSequence.from_lengths([1, 4])
    far_apart = torch.empty_strided((1, 5, 1, 64), (2**32, 2**29, 64, 1), device="meta", dtype=torch.bfloat16)
    near = torch.empty(1, 5, 1, 64, device="meta", dtype=torch.bfloat16)
    with pytest.raises(BackendUnavailable, match="found a document of 4 tokens, more than .* wanted shorter .*varlen"):
        attention(far_apart, near, near, packed, backend="triton")


@pytest.mark.parametrize("follows", [False, True], ids=["queries", "keys"])
def test_blocks_cover_every_token_once_and_the_longest_come_first(follows):
    packed = PackedSequence.from_lengths([1, 128, 129, 300, 5])
    blocks = plan_blocks(packed, follows)
    tokens = torch.cat([first + torch.arange(start, min(start + 128, length)) for first, start, length in blocks.tolist()])
    assert torch.equal(tokens.sort().values, torch.arange(packed.num_tokens))
    work = blocks[:, 2] - blocks[:, 1] if follows else blocks[:, 1]
    assert (work.diff() <= 0).all()
    assert {tuple(block[::2]) for block in blocks.tolist()} == {(0, 1), (1, 128), (129, 129), (258, 300), (558, 5)}
