"""Buckets: our kernels on a padded row with empty documents, against the row by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_packfree.graphs.bucket import FINEST, STEPS, Bucket, bucket_of, in_bucket, lengthened
from hf_packfree.packing import PackedSequence, chunk_plan

rows = st.lists(st.integers(1, 700), min_size=1, max_size=40)


@given(rows)
def test_a_bucket_holds_its_row_and_wastes_little(lengths):
    packed = PackedSequence.from_lengths(lengths)
    bucket = bucket_of(packed)
    assert bucket.holds(packed)
    assert bucket.tokens - packed.num_tokens < max(bucket.tokens / STEPS, FINEST)


@given(rows, rows)
def test_rows_of_a_bucket_have_plans_of_one_size(lengths, others):
    first, second = map(PackedSequence.from_lengths, (lengths, others))
    tokens = max(first.num_tokens, second.num_tokens) + 7
    bucket = Bucket(tokens, 64, tokens)
    plans = [chunk_plan(in_bucket(packed, bucket), 64) for packed in (first, second)]
    assert [part.shape for part in plans[0]] == [part.shape for part in plans[1]]
    for packed, (offsets, segment, number) in zip((first, second), plans, strict=True):
        row = in_bucket(packed, bucket)
        sizes = np.diff(row.cu_seqlens_cpu.numpy())
        assert row.num_segments == 64 and sizes.sum() == tokens and sizes[-1] == 0
        alone, count = chunk_plan(packed, 64), len(chunk_plan(packed, 64)[1])
        assert (segment[:count] == alone[1]).all() and (number[:count] == alone[2]).all()
        # what is beyond the row's chunks has no token
        assert (sizes[segment[offsets[-1] :]] == 0).all()


def test_a_bucket_is_not_for_rows_that_are_much_shorter():
    bucket = Bucket(1600, 16, 1024)
    assert bucket.holds(PackedSequence.from_lengths([1000, 500]))
    assert not bucket.holds(PackedSequence.from_lengths([1000, 499]))
    assert not bucket.holds(PackedSequence.from_lengths([1025, 500]))
    assert not bucket.holds(PackedSequence.from_lengths([100] * 15))


def _padded(x: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    return lengthened(x.detach(), bucket, 1).requires_grad_()


@pytest.mark.slow
def test_our_kernels_skip_empty_documents():
    pytest.importorskip("triton")
    from hf_packfree.ops.attention import triton_native as attention
    from hf_packfree.ops.conv import triton_native as conv

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
