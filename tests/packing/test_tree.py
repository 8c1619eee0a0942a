"""The record of a row in which documents share their beginnings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from hf_packfree.errors import BoundaryError, UnsupportedInput
from hf_packfree.mtp.head import predicts
from hf_packfree.packing import PackedSequence, shard_row, to_hf_kwargs
from tests.trees import CHAIN, GROUP, TURNS, forests


@given(tree=forests())
def test_positions_count_along_every_path(tree):
    packed = tree.record
    assert packed.position_ids().shape == (1, sum(tree.lengths)) == packed.batch_shape
    for tokens in tree.samples:
        assert packed.position_ids()[0, tokens].tolist() == list(range(len(tokens)))


@given(tree=forests())
def test_the_token_in_front_of_each_is_the_one_on_its_path(tree):
    packed = tree.record
    if packed.tree is None:
        return
    found = packed.tree.predecessors()
    for tokens in tree.samples:
        assert found[tokens].tolist() == [-1, *tokens[:-1].tolist()]


def test_a_segment_sees_its_path():
    of_token = TURNS.record.seq_idx[0].long()
    for segment, seen in enumerate(TURNS.record.tree.sees()):
        assert seen.nonzero()[:, 0].tolist() == of_token[TURNS.tokens(segment)].unique().tolist()


@pytest.mark.parametrize("roots", [[None, None], [-1, -1], torch.tensor([-1, -1])], ids=str)
def test_a_forest_of_roots_is_plain_packing(roots):
    packed, plain = PackedSequence.from_tree([3, 2], roots), PackedSequence.from_lengths([3, 2])
    assert packed.tree is None and packed.lengths == plain.lengths
    assert torch.equal(packed.position_ids(), plain.position_ids())


@pytest.mark.parametrize(
    ("parents", "says"),
    [
        ([None, 0], r"found parents \[None, 0\] of 3 segments; wanted one whole number"),
        ([None, 0, 1.0], "of 3 segments; wanted one whole number"),
        ([None, 0, True], "of 3 segments; wanted one whole number"),
        ([None, 2, 1], "found 2 as the parent of segment 1; wanted a segment before it"),
        ([0, 0, 1], "found 0 as the parent of segment 0"),
        ([None, -2, 1], "found -2 as the parent of segment 1"),
    ],
)
def test_parents_that_are_none(parents, says):
    with pytest.raises(BoundaryError, match=says):
        PackedSequence.from_tree([3, 2, 1], parents)


def test_lengths_that_are_none():
    with pytest.raises(BoundaryError, match="found document lengths"):
        PackedSequence.from_tree([3, 0], [None, 0])


def test_a_tree_stays_whole_in_other_places():
    packed = TURNS.record
    moved = packed.to("meta")
    assert moved.tree is packed.tree and moved.position_ids().is_meta
    assert packed.for_shape((1, packed.num_tokens)).tree is packed.tree
    with pytest.raises(UnsupportedInput, match="a tree of shared prefixes under context parallel"):
        shard_row(packed, 0, 2)


def test_what_can_say_documents_alone_refuses_a_tree():
    with pytest.raises(UnsupportedInput, match="a tree .* in transformers' keywords"):
        to_hf_kwargs(TURNS.record)
    with pytest.raises(UnsupportedInput, match="a tree .* for a multi-token prediction head"):
        predicts(TURNS.record, 1)


def test_documents_are_the_paths():
    assert GROUP.record.num_documents == 4 and TURNS.record.num_documents == 6
    assert GROUP.record.num_real_tokens == sum(GROUP.lengths)


def test_the_trees_of_the_tests_are_what_they_are_said_to_be():
    assert [tree.depth for tree in (GROUP, TURNS, CHAIN)] == [2, 4, 6]
    assert TURNS.record.tree.leaves == [2, 4, 7, 8, 9, 10] and len(TURNS.samples) == 8
