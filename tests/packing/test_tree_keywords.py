"""What describes a tree of shared prefixes: TRL's keywords, the record, and both beside each
other.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given

from hf_packfree.errors import BoundaryConflict, BoundaryError, UnsupportedInput
from hf_packfree.packing import Batch, PackedSequence, PackingInputs, resolve_boundaries
from hf_packfree.packing.tree_keywords import RECORD
from tests.trees import GROUP, TURNS, forests

CPU = torch.device("cpu")


def keywords_of(tree):
    """What TRL 1.16 and huggingface/trl#7686 pass for a tree, without the positions."""
    paths = [tree.tokens(segment) for segment in range(len(tree.lengths))]
    lengths, depths = torch.tensor(tree.lengths), [0] * len(paths)
    for segment, parent in enumerate(tree.parents):
        depths[segment] = 0 if parent is None else depths[parent] + 1
    sizes = torch.tensor(list(map(len, paths)))
    return {
        "tree_kv_index": torch.cat(paths),
        "tree_cu_seqlens_q": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        "tree_cu_seqlens_k": torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int(),
        "tree_max_seqlen_q": int(lengths.max()),
        "tree_max_seqlen_k": int(sizes.max()),
        "tree_segment_parents": torch.tensor([-1 if p is None else p for p in tree.parents]),
        "tree_segment_depths": torch.tensor(depths),
        "tree_level_sizes": np.bincount(depths).tolist(),
        "tree_n_chunks": 7,
    }


def read(tokens, positions=None, mask=None, rows=1, **keywords):
    inputs = PackingInputs.from_kwargs(keywords, position_ids=positions, attention_mask=mask)
    assert keywords == {}, "keywords for trees reach no layer"
    return resolve_boundaries(inputs, Batch(torch.arange(rows * tokens).view(rows, tokens)))


PATHS = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
TRLS = (*PATHS, "tree_max_seqlen_q", "tree_max_seqlen_k")
PARENTS = ("tree_cu_seqlens_q", "tree_segment_parents")


@given(tree=forests())
@pytest.mark.parametrize(
    "names", [None, TRLS, PATHS, PARENTS], ids=["all", "1.16", "paths", "7686"]
)
def test_every_tree_is_read(names, tree):
    keywords, wanted = keywords_of(tree), tree.record
    given = keywords if names is None else {name: keywords[name] for name in names}
    found = read(sum(tree.lengths), wanted.position_ids(), **given)
    assert found.lengths == wanted.lengths
    assert (found.tree and found.tree.parents) == (wanted.tree and wanted.tree.parents)


@pytest.mark.parametrize(
    "left_out", [("tree_cu_seqlens_q",), ("tree_kv_index", "tree_segment_parents")]
)
def test_keywords_that_are_no_tree_without_others(left_out):
    keywords = {name: value for name, value in keywords_of(TURNS).items() if name not in left_out}
    with pytest.raises(BoundaryError, match="without the rest of a tree"):
        read(sum(TURNS.lengths), **keywords)


def test_a_keyword_that_nobody_knows():
    with pytest.raises(UnsupportedInput, match="found the keyword tree_roots, which describes a"):
        read(sum(TURNS.lengths), **keywords_of(TURNS), tree_roots=[0])
    assert read(9, tree_kv_index=None) is None


def changed(name, change):
    """The keywords of a tree, one of them changed in place or replaced."""
    keywords = keywords_of(TURNS)
    given = keywords[name].clone() if isinstance(keywords[name], torch.Tensor) else keywords[name]
    replaced = change(given)
    return keywords | {name: given if replaced is None else replaced}


def swap(at, value):
    def change(given):
        given[at] = value

    return change


@pytest.mark.parametrize(
    ("name", "change", "error", "says"),
    [
        ("tree_segment_parents", swap(5, 1), BoundaryConflict, "tree_kv_index that describe diff"),
        ("tree_segment_depths", swap(3, 1), BoundaryConflict, "tree_segment_depths and"),
        ("tree_level_sizes", swap(0, 4), BoundaryConflict, "tree_level_sizes and"),
        ("tree_max_seqlen_q", lambda n: n - 1, BoundaryConflict, "tree_max_seqlen_q=128 with"),
        ("tree_max_seqlen_k", lambda n: n - 1, BoundaryConflict, "tree_max_seqlen_k=.* a path of"),
        ("tree_kv_index", swap(40, 0), BoundaryError, "a path to segment 1 that is not another"),
        ("tree_kv_index", swap(-1, 0), BoundaryError, "a path to segment 10 that is not another"),
        ("tree_kv_index", lambda x: x[:-1], BoundaryError, "found tree_cu_seqlens_k from"),
        ("tree_cu_seqlens_k", lambda x: x[:-1], BoundaryError, "found tree_cu_seqlens_k from"),
        ("tree_cu_seqlens_q", swap(0, -1), BoundaryError, "found tree_cu_seqlens_q from"),
        ("tree_cu_seqlens_q", swap(2, 20), BoundaryError, "found tree_cu_seqlens_q from"),
        ("tree_kv_index", lambda x: x.float(), BoundaryError, "no row of integers"),
        ("tree_segment_depths", lambda x: object(), BoundaryError, "as object, no row of integers"),
        ("tree_segment_parents", lambda x: x[:-1], BoundaryConflict, "describe different trees"),
    ],
)
def test_keywords_that_contradict_each_other(name, change, error, says):
    with pytest.raises(error, match=says):
        read(sum(TURNS.lengths), **changed(name, change))


def test_positions_that_contradict_a_tree():
    positions, keywords = TURNS.record.position_ids().clone(), keywords_of(TURNS)
    tokens = sum(TURNS.lengths)
    positions[0, 100] += 1
    for wrong in (positions, positions[None].expand(4, -1, -1)):
        with pytest.raises(
            BoundaryConflict, match="tree_cu_seqlens_q in disagreement at token 100"
        ):
            read(tokens, wrong, **keywords)
    with pytest.raises(BoundaryError, match=r"found position_ids \[1, 9\] with"):
        read(tokens, positions[:, :9], **keywords)
    with pytest.raises(BoundaryError, match=r"found position_ids \[2, "):
        read(tokens, positions.expand(2, -1), **keywords)


def test_what_else_describes_documents_is_refused():
    tokens, keywords = sum(TURNS.lengths), keywords_of(TURNS)
    offsets = torch.tensor([0, tokens], dtype=torch.int32)
    for name in ("cu_seq_lens_q", "cu_seqlens"):
        with pytest.raises(UnsupportedInput, match=f"found {name} with a tree"):
            read(tokens, **keywords, **{name: offsets})
    mask = torch.ones(1, tokens)
    assert read(tokens, mask=mask, **keywords).tree is not None
    mask[0, -1] = 0
    with pytest.raises(UnsupportedInput, match="found attention_mask with a tree"):
        read(tokens, mask=mask, **keywords)
    with pytest.raises(UnsupportedInput, match="a tree of shared prefixes in a batch of 2 rows"):
        read(tokens, rows=2, **keywords)


def test_the_record_beside_keywords():
    packed, other, keywords = TURNS.record, GROUP.record, keywords_of(TURNS)
    tokens = sum(TURNS.lengths)

    def beside(record, **given):
        inputs = PackingInputs(tree={RECORD: record} | given)
        return resolve_boundaries(inputs, Batch(torch.arange(tokens)[None]))

    assert beside(packed) is packed
    assert beside(packed, **keywords).tree.parents == packed.tree.parents
    flat = PackedSequence.from_lengths(TURNS.lengths)
    for record in (other, flat):
        with pytest.raises(BoundaryConflict, match="packed_sequence and tree_cu_seqlens_q that"):
            beside(record, **keywords)
    with pytest.raises(BoundaryConflict, match="found packed_sequence of 137 tokens for a row"):
        beside(other)
