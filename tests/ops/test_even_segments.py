"""Segments of bounded rows, as CUDA graphs have them: against the same documents by themselves."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hf_packfree.graphs.bucket import Bucket, in_bucket
from hf_packfree.graphs.captured_sequence import CapturedSequence
from hf_packfree.graphs.unread import UnreadSequence
from hf_packfree.ops.delta_rule import flash_qla, gated_delta_rule
from hf_packfree.ops.delta_rule.even_segments import cut_evenly, segment_size, segments_of
from hf_packfree.ops.delta_rule.flash_qla import planned_cu_seqlens
from hf_packfree.ops.delta_rule.segments import Segments, walk_segments
from hf_packfree.ops.delta_rule.torch_chunked import TorchScans
from hf_packfree.ops.fla_support import CHUNK
from hf_packfree.packing import PackedSequence
from hf_packfree.packing.marks import FLASH_QLA_PLAN
from tests.ops.test_delta_rule_states import with_state
from tests.support import relative_rms, values_and_gradients

BUCKET = Bucket(tokens=1024, documents=16, longest=1024)
rows = st.lists(st.integers(1, 400), min_size=1, max_size=12).filter(lambda row: sum(row) <= 1024)


def in_pieces(packed, size):
    """Return a record's segments of so many chunks."""
    return Segments(*packed.cached(cut_evenly, size))


@settings(max_examples=60)
@given(lengths=rows, size=st.integers(1, 8), longest=st.sampled_from([400, 1024]))
def test_every_document_is_cut_by_itself(lengths, size, longest):
    packed, bucket = PackedSequence.from_lengths(lengths), replace(BUCKET, longest=longest)
    assume(bucket.takes(packed))
    row = in_bucket(packed, bucket)
    segments = in_pieces(row, size)
    record, step = segments.record, size * CHUNK
    assert record.num_segments == 1024 // step + 16
    assert record.bounded and record.max_seqlen == min(step, longest)
    assert record.cu_seqlens_cpu[-1] == 1024
    plans = record.cu_seqlens, record.seq_idx, segments.firsts, segments.chunks
    assert {plan.dtype for plan in plans} == {torch.int32}
    firsts, chunks = segments.firsts.tolist(), segments.chunks.tolist()
    # those of padding, too
    for number, length in enumerate(filter(None, row.lengths)):
        first, end = firsts[number : number + 2]
        whole, rest = divmod(length, step)
        wanted = [step] * whole + [rest] * (rest > 0)
        assert record.lengths[first:end] == wanted
        counts = [-(-piece // CHUNK) for piece in wanted]
        assert chunks[0][first:end] == [*counts[:-1], 0]
        assert chunks[1][first:end] == [0, *counts[1:]]
    # what fills the plan up
    assert set(firsts[number + 1 :]) == {end} and not any(record.lengths[end:])
    assert not any(chunks[0][end:]) and not any(chunks[1][end:])
    counted = torch.bincount(record.seq_idx[0], minlength=record.num_segments)
    assert counted.tolist() == record.lengths


@settings(max_examples=20)
@given(lengths=rows, other=rows, size=st.integers(1, 5))
@mock.patch.object(flash_qla, "is_known", lambda: True)
def test_plans_of_the_device_are_those_of_the_host(lengths, other, size):
    """And a captured record becomes another row's."""
    captured = CapturedSequence.of(in_bucket(PackedSequence.from_lengths(other), BUCKET))
    in_pieces(captured, size).record.cached(planned_cu_seqlens)
    row = in_bucket(PackedSequence.from_lengths(lengths), BUCKET)
    starts = torch.zeros(1025, dtype=torch.bool)
    starts[row.cu_seqlens[:-1].long()] = True
    captured.become(UnreadSequence.of(starts[:-1], BUCKET))
    found, wanted = in_pieces(captured, size), in_pieces(row, size)
    assert torch.equal(found.firsts, wanted.firsts) and torch.equal(found.chunks, wanted.chunks)
    assert torch.equal(found.record.cu_seqlens, wanted.record.cu_seqlens)
    assert torch.equal(found.record.seq_idx, wanted.record.seq_idx)
    offsets = [each.record.cached(planned_cu_seqlens) for each in (found, wanted)]
    assert torch.equal(*offsets)
    (*sizes, chunks), (*others, wanted) = map(FLASH_QLA_PLAN.of, offsets)
    assert torch.equal(chunks, wanted) and torch.equal(sizes.pop(1), others.pop(1))
    assert sizes == others


@pytest.mark.parametrize("lengths", [[900], [300, 1, 64, 500], [128, 128, 256, 512]], ids=str)
def test_cut_documents_are_whole_documents(lengths):
    """In fp64, values and gradients; the control forgets what came before a segment."""
    packed = PackedSequence.from_lengths(lengths)
    tokens = packed.num_tokens
    segments = in_pieces(in_bucket(packed, BUCKET), 1)
    inputs = with_state(lengths)[:5]

    def padded(*inputs):
        return [torch.cat([x, x.new_zeros(1, 1024 - tokens, *x.shape[2:])], 1) for x in inputs]

    wanted = values_and_gradients(lambda *x: gated_delta_rule(*x, packed, qk_l2norm=False), inputs)
    found = values_and_gradients(
        lambda *x: walk_segments(*padded(*x), segments, TorchScans())[:, :tokens], inputs
    )
    for a, b in zip(found, wanted, strict=True):
        assert relative_rms(a, b) <= 1e-10
    apart = gated_delta_rule(*padded(*inputs), segments.record, qk_l2norm=False)[:, :tokens]
    assert relative_rms(apart, wanted[0]) > 0.1


@pytest.mark.parametrize(
    "tokens, longest, parallel, wanted",
    [
        # one document, 8 segments at once: into those that were fastest on an H200
        (2048, 2048, 8, 4),
        (4096, 4096, 8, 8),
        (8192, 8192, 8, 16),
        # others, by the same model of costs
        (8192, 4096, 8, 16),
        (8192, 8192, 4, 32),
        (4096, 2048, 8, None),
        (8192, 1024, 8, None),
        # folding more of them would take longer than walking them side by side saves
        (1024, 1024, 16, None),
        (4096, 4096, 16, 8),
        (2048, 256, 8, None),
        (8192, 8192, 1, None),
    ],
)
def test_a_row_is_cut_where_one_document_would_be_waited_for(tokens, longest, parallel, wanted):
    assert segment_size(tokens, 16, longest, parallel) == wanted


def test_rows_are_cut_by_their_bucket():
    row = in_bucket(PackedSequence.from_lengths([8000]), Bucket(8192, 16, 8192))
    segments = segments_of(row, 8)
    assert segments is not None and segments.record.lengths[:9] == [1024] * 7 + [832, 192]
    short = in_bucket(PackedSequence.from_lengths([500] * 16), Bucket(8192, 32, 512))
    assert segments_of(short, 8) is None
    # a row that no other follows is cut by what its documents are
    alone = segments_of(PackedSequence.from_lengths([20000]), 8)
    assert alone is not None and not alone.record.bounded
