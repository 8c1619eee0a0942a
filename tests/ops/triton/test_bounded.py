"""Our kernels on a row that is padded to a bucket, with empty documents behind: the row's own bits."""

from __future__ import annotations

import torch

from hf_packfree.graphs.bucket import Bucket, in_bucket, lengthened
from hf_packfree.ops.attention import triton_native as attention
from hf_packfree.ops.conv import triton_native as conv
from hf_packfree.packing import PackedSequence


def _padded(x: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    return lengthened(x.detach(), bucket, 1).requires_grad_()


def test_our_kernels_skip_empty_documents():
    packed = PackedSequence.from_lengths([3, 130, 1, 60])
    bucket = Bucket(208, 8, 256)
    row, generator = in_bucket(packed, bucket), torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(1, packed.num_tokens, *shape, generator=generator).requires_grad_()

    q, k, v, x = drawn(2, 64), drawn(1, 64), drawn(1, 64), drawn(64)
    weight = torch.randn(64, 1, 4, generator=generator)
    for parts, run in (
        ((q, k, v), lambda *inputs: attention.attend(*inputs[:-1], inputs[-1])),
        ((x,), lambda x, packed: conv.causal_conv1d(x, weight, packed, None, True)),
    ):
        alone = run(*parts, packed)
        longer = [_padded(part, bucket) for part in parts]
        out = run(*longer, row)
        d_out = torch.randn(alone.shape, generator=generator)
        wanted = torch.autograd.grad(alone, parts, d_out)
        found = torch.autograd.grad(out, longer, lengthened(d_out, bucket, 1))
        assert torch.equal(out[:, : packed.num_tokens], alone)
        for part, other in zip(found, wanted, strict=True):
            assert torch.equal(part[:, : packed.num_tokens], other)
            assert not part[:, packed.num_tokens :].any()
