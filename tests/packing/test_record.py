"""The record, and the plans it keeps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_packfree.errors import BoundaryError
from hf_packfree.packing import PackedSequence, chunk_plan, shard_row
from hf_packfree.packing.bounded import on_host
from tests.input_formats import one_row

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=7)


@given(lengths=LENGTHS)
def test_the_record_is_consistent(lengths):
    packed = PackedSequence.from_lengths(lengths)
    row = one_row(lengths)
    assert packed.cu_seqlens.dtype == packed.seq_idx.dtype == torch.int32
    assert (
        packed.lengths == lengths
        and packed.max_seqlen == max(lengths)
        and packed.num_segments == len(lengths)
    )
    assert torch.equal(packed.cu_seqlens, row["cu_seqlens"]) and torch.equal(
        packed.cu_seqlens_cpu, row["cu_seqlens"]
    )
    assert torch.equal(packed.position_ids(), row["position_ids"])
    assert torch.equal(packed.seq_idx, row["seq_idx"])


@given(lengths=LENGTHS)
def test_a_record_on_the_host_is_that_of_the_row(lengths):
    tokens = sum(lengths)
    packed = PackedSequence.from_lengths(
        lengths, batch_shape=(2, tokens), indices=torch.arange(tokens) + tokens
    )
    packed.position_ids()
    host = on_host(packed)
    assert torch.equal(host.seq_idx, packed.seq_idx) and host.seq_idx.dtype == torch.int32
    assert torch.equal(host.cu_seqlens, packed.cu_seqlens)
    assert host.max_seqlen == packed.max_seqlen and host.batch_shape == (1, tokens)
    assert host.indices is None and torch.equal(host.position_ids(), packed.position_ids())


@pytest.mark.parametrize("lengths", [[], [3, 0, 2], [-1]])
def test_documents_have_at_least_one_token(lengths):
    with pytest.raises(BoundaryError, match="at least one token"):
        PackedSequence.from_lengths(lengths)


@pytest.mark.parametrize(
    "lengths",
    [
        [1.5, 2],
        [True, 5],
        "52",
        [[1, 2]],
        [[1], [2, 3]],
        torch.tensor([1.0, 2.0]),
        torch.ones(2, device="meta"),
        [2**70],
    ],
)
def test_lengths_are_integers(lengths):
    with pytest.raises(BoundaryError, match="wanted one or more integers"):
        PackedSequence.from_lengths(lengths)


@pytest.mark.parametrize("lengths", [[2**31], [2**30, 2**30]])
def test_a_row_has_as_many_tokens_as_int32_counts(lengths):
    with pytest.raises(BoundaryError, match="2147483648 tokens together; wanted fewer"):
        PackedSequence.from_lengths(lengths)


@given(lengths=LENGTHS, data=st.data())
def test_padding_segments_count_as_no_documents(lengths, data):
    padding = data.draw(st.sets(st.integers(0, len(lengths) - 1)))
    packed = PackedSequence.from_lengths(lengths, padding_segments=sorted(padding))
    real = [segment not in padding for segment, length in enumerate(lengths) for _ in range(length)]
    assert packed.is_real().tolist() == [real]
    assert packed.num_real_tokens == sum(real) and packed.num_documents == len(lengths) - len(
        padding
    )
    row = torch.randn(sum(lengths), 2)
    assert torch.equal(packed.select_real(row), row[torch.tensor(real)] if any(real) else row)


@given(lengths=LENGTHS, size=st.integers(1, 5))
def test_chunks_cover_every_segment_in_order(lengths, size):
    offsets, segment, number = chunk_plan(PackedSequence.from_lengths(lengths), size)
    wanted = [
        (index, chunk)
        for index, length in enumerate(lengths)
        for chunk in range(-(-length // size))
    ]
    assert list(zip(segment.tolist(), number.tolist())) == wanted
    assert offsets.tolist() == [
        sum(index < upto for index, _ in wanted) for upto in range(len(lengths) + 1)
    ]


def repeated(packed, times):
    return [packed.num_tokens] * times


def one_plan(packed):
    def build(packed):
        return "one"

    return packed.cached(build)


def other_plan(packed):
    def build(packed):
        return "other"

    return packed.cached(build)


def test_a_plan_is_made_once_for_each_function_and_its_arguments():
    packed, built = PackedSequence.from_lengths([3, 2]), []

    def build(packed, size):
        built.append(size)
        return [size]

    assert (
        packed.cached(build, 3) is packed.cached(build, 3)
        and packed.cached(build, 4) == [4]
        and built == [3, 4]
    )
    assert packed.to("meta").cached(build, 3) == [3] and built == [3, 4, 3], (
        "tensors of another device are other plans"
    )
    assert packed.cached(repeated, 3) is packed.cached(repeated, 3)


def test_nested_functions_of_the_same_name_are_different_plans():
    packed = PackedSequence.from_lengths([3, 2], padding_segments=[1])
    assert one_plan(packed) == "one" and other_plan(packed) == "other" and one_plan(packed) == "one"
    assert packed.position_ids().dtype == torch.int64 and packed.is_real().dtype == torch.bool
    assert packed.select_real(torch.arange(5)).tolist() == [0, 1, 2]


def test_a_plan_made_in_inference_mode_can_be_trained_with():
    packed = PackedSequence.from_lengths([3, 2])
    with torch.inference_mode():
        packed.position_ids()
    weight = torch.ones(5, requires_grad=True)
    (weight * packed.position_ids()[0]).sum().backward()
    assert weight.grad.tolist() == [0, 1, 2, 0, 1]


def test_what_a_record_says_of_the_row_that_ranks_share():
    """Of a whole row all of it is the row itself; a shard's is padded until ranks divide it."""
    packed, row = PackedSequence.from_lengths([3, 2]), torch.arange(1, 6)[None]
    assert not packed.is_shard and packed.ranks == 1
    assert packed.whole_row is packed and packed.whole_batch is packed and packed.cut(row) is row
    last = shard_row(packed, 1, 2)
    assert last.is_shard and last.ranks == 2 and last.whole_batch is packed
    assert last.whole_row.lengths == [3, 2, 1] and last.num_tokens == 3
    assert last.cut(row, fill=-100).tolist() == [[4, 5, -100]]
    assert last.cut(row, more=1, fill=-100).tolist() == [[4, 5, -100, -100]]
    assert last.cut(row[..., None].float()).flatten().tolist() == [4, 5, 0]
