"""The order in which the delta rule takes documents: the same documents, the longest first, every token found again."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_packfree.ops.order import longest_first, moved, moved_back
from hf_packfree.packing import PackedSequence

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=12)


def chunks(lengths):
    return [-(-length // 64) for length in lengths]


@given(LENGTHS)
def test_the_same_documents_the_longest_first(lengths):
    packed = PackedSequence.from_lengths(lengths)
    order = longest_first(packed)
    if order is None:
        assert chunks(lengths) == sorted(chunks(lengths), reverse=True)
        return
    found = order.packed.lengths
    assert sorted(found) == sorted(lengths)
    assert chunks(found) == sorted(chunks(lengths), reverse=True) != chunks(lengths)
    tokens = torch.arange(sum(lengths))
    there = moved(tokens[None], order.rows)[0]
    documents = [part.tolist() for part in there.split(found)]
    assert sorted(documents) == [part.tolist() for part in tokens.split(lengths)], "whole documents, in their own order"
    assert torch.equal(moved_back(there[None], order.rows)[0], tokens)
    assert order.rows.dtype == torch.int32


def test_nothing_moves_where_the_order_does_not_matter():
    for lengths in ([7], [300, 65, 128, 2, 64], [64] * 5, [1, 64, 3]):  # one; longest first; as many chunks
        assert longest_first(PackedSequence.from_lengths(lengths)) is None, lengths
