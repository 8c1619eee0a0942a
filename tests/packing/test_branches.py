"""Positions that go back into the middle of a document: a tree's branch, or a document without its
beginning. Refused where nothing else says which; what restarts otherwise is not.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_packfree.errors import BoundaryError
from hf_packfree.packing import Batch, PackingInputs, resolve_boundaries
from tests.input_formats import INT32, one_row

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=7)
SAYS = "go back into the middle of the document before, from {} to {} at row {}, token {}"
TREE = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7]])
"""A prompt of five tokens with rollouts of four and of three."""


def lengths_of(positions, ids=None, **inputs):
    """The lengths that positions [B, S] say, of different tokens or of `ids`; None: upstream's."""
    ids = torch.arange(positions.shape[-2:].numel()) if ids is None else ids
    batch = Batch(ids.view(positions.shape[-2:]))
    packed = resolve_boundaries(PackingInputs(position_ids=positions, **inputs), batch)
    return None if packed is None else packed.lengths


@pytest.mark.parametrize("rows", [None, 3, 4])
@pytest.mark.parametrize("dtype", [torch.int64, INT32, torch.int16])
def test_a_branch_is_refused(rows, dtype):
    given = TREE.to(dtype) if rows is None else TREE.to(dtype)[None].expand(rows, -1, -1)
    with pytest.raises(BoundaryError, match=SAYS.format(8, 5, 0, 9)):
        lengths_of(given)
    plain = torch.cat([torch.arange(9), torch.arange(3)])[None]
    with pytest.raises(BoundaryError, match=SAYS.format(8, 5, 1, 9)):
        lengths_of(torch.cat([plain, TREE]))


@st.composite
def trees(draw):
    """Positions of trees in a row, each node behind its parent, and at least one of two children."""
    depth_first = draw(st.booleans())
    positions = []
    for _ in range(draw(st.integers(0, 2))):
        positions += range(draw(st.integers(1, 9)))
    waiting = [(0, draw(st.integers(2, 3)))]
    nodes = 0
    while waiting:
        start, children = waiting.pop(-1 if depth_first else 0)
        end = start + draw(st.integers(1, 5))
        positions += range(start, end)
        nodes += 1
        waiting += [(end, draw(st.integers(0, 2)) if nodes < 5 else 0) for _ in range(children)]
    return torch.tensor(positions)[None]


@given(positions=trees())
def test_every_tree_is_refused(positions):
    with pytest.raises(BoundaryError, match="go back into the middle"):
        lengths_of(positions)
    padded = torch.nn.functional.pad(positions, (0, 3), value=1)
    mask = torch.ones_like(positions)
    with pytest.raises(BoundaryError, match="go back into the middle|jump ahead within a padded"):
        lengths_of(padded, attention_mask=torch.nn.functional.pad(mask, (0, 3)))


@pytest.mark.parametrize("kind", ["seq_idx", "cu_seq_lens_q", "attention_mask"])
def test_beside_a_format_that_separates_documents_it_is_one_without_its_beginning(kind):
    row = one_row([9, 3])
    given = {"seq_idx": row["seq_idx"], "cu_seq_lens_q": row["cu_seqlens"]}
    given["attention_mask"] = row["seq_idx"] + 1
    assert lengths_of(TREE, **{kind: given[kind]}) == [9, 3]


@given(lengths=LENGTHS, start=st.integers(0, 9), first=st.integers(0, 9))
def test_documents_that_all_start_at_one_number_are_taken(lengths, start, first):
    """transformers' collator has `position_ids_start`; a row may begin with the rest of one."""
    positions = one_row(lengths)["position_ids"] + start
    positions[:, : lengths[0]] += first
    # tokens that go on by accident are one document
    jumps = (positions[0].diff() != 1).sum().item() + 1
    found = lengths_of(positions)
    assert (found or [sum(lengths)]) == lengths or jumps < len(lengths)


@given(
    lengths=LENGTHS,
    starts=st.lists(st.integers(0, 99), min_size=7, max_size=7),
    kind=st.sampled_from(["fall", "jump ahead"]),
)
def test_documents_whose_starts_fall_or_jump_ahead_are_taken(lengths, starts, kind):
    starts = sorted(starts, reverse=kind == "fall")[: len(lengths)]
    if kind == "jump ahead":
        ends = torch.tensor([0, *lengths]).cumsum(0)
        starts = [start + 2 * number + int(ends[number]) for number, start in enumerate(starts)]
    positions = [torch.arange(n) + s for n, s in zip(lengths, starts, strict=True)]
    assert (lengths_of(torch.cat(positions)[None]) or [sum(lengths)]) == lengths


@given(lengths=LENGTHS, extra=st.integers(2, 4), fill=st.integers(0, 3))
def test_a_tail_of_padding_has_any_position(lengths, extra, fill):
    positions = torch.nn.functional.pad(one_row(lengths)["position_ids"], (0, extra), value=fill)
    ids = torch.nn.functional.pad(torch.arange(1, sum(lengths) + 1), (0, extra))
    if fill != lengths[-1]:
        assert lengths_of(positions, ids) == [*lengths, extra]


@given(rows=st.lists(st.integers(1, 9), min_size=1, max_size=4), left=st.booleans())
@pytest.mark.parametrize("fill", [0, 1])
def test_padding_that_a_mask_marks_has_any_position(rows, left, fill):
    width = max(rows) + 2
    mask = torch.stack([torch.arange(width) < n for n in rows])
    mask = mask.flip(1) if left else mask
    positions = (mask.cumsum(1) - 1).masked_fill(~mask, fill)
    assert lengths_of(positions, attention_mask=mask.long()) is None, "one document a row"


def test_positions_that_stop_growing_are_refused():
    """Cut off at a model's longest position, say: every token would be a document."""
    positions = torch.arange(12).clamp(max=8)[None]
    with pytest.raises(BoundaryError, match=SAYS.format(8, 8, 0, 9)):
        lengths_of(positions)
