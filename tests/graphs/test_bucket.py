"""Buckets: our kernels on a padded row with empty documents, against the row by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_packfree.graphs.bucket import FINEST, STEPS, Bucket, bucket_of, in_bucket
from hf_packfree.graphs.captured_sequence import CapturedSequence, NotCapturable
from hf_packfree.ops.attention import cudnn
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


@given(rows, st.integers(0, 3000), st.integers(0, 700), st.integers(2, 9))
def test_a_bucket_takes_shorter_rows_with_padding_no_longer_than_its_documents(
    lengths, spare, longer, further
):
    packed = PackedSequence.from_lengths(lengths)
    longest = max(lengths) + longer
    bucket = Bucket(packed.num_tokens + spare, len(lengths) + further, longest)
    of_padding = -(-spare // longest)
    assert bucket.takes(packed) == (max(of_padding, 1) < further)
    if not bucket.takes(packed):
        return
    row = in_bucket(packed, bucket)
    sizes = np.diff(row.cu_seqlens_cpu.numpy()).tolist()
    padding = sizes[len(lengths) : len(lengths) + of_padding]
    assert sizes[: len(lengths)] == lengths and sum(padding) == spare
    assert max(padding, default=0) <= longest and not any(sizes[len(lengths) + of_padding :])
    # the last is empty, as plans want it
    assert sizes[-1] == 0 and len(sizes) == bucket.documents
    assert torch.equal(row.seq_idx[0].bincount(minlength=len(sizes)), torch.tensor(sizes))
    assert (row.seq_idx[0].diff() >= 0).all()


def test_documents_of_a_bounded_row_do_not_go_to_cudnn(monkeypatch):
    packed = PackedSequence.from_lengths([40, 8])
    x = torch.zeros(1, 48, 1, 8)
    monkeypatch.setattr(cudnn, "_usable", lambda *_: True)
    monkeypatch.setattr(cudnn, "_attend_document", lambda q, *_: q + 1)
    monkeypatch.setattr(cudnn.triton_native, "attend", lambda q, *_, **__: q)
    assert cudnn.attend(x, x, x, packed, long=40).sum() == 40 * 8
    row = in_bucket(packed, bucket_of(packed))
    assert cudnn.attend(x, x, x, row, long=40).sum() == 0


def test_no_other_record_is_made_of_a_captured_one():
    """A graph could not be replayed for the next row: the layers run without one."""
    captured = CapturedSequence.of(PackedSequence.from_lengths([3, 5]))
    assert captured.for_shape((1, 8)) is captured
    with pytest.raises(NotCapturable, match="differs between rows"):
        captured.for_shape((2, 4))
